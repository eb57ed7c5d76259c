"""The loops around the assignment to the output: which of them change the element that is assigned.

For C(i,k) += A(i,j) * B(j,k) in loops over i, j, k, those of i and k change the element (i, k),
that of j does not. From this follows where a sum can stay in a scalar (reductions.py), which
iterations meet in one element, and where a loop over the positions of several levels comes to
another element: at the ends of segments. A segment is all that one position of a level has at the
next level: a row of CSR.
"""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.loopir import CPU_VECTOR, GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.lowering.relations import Relations
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Body, Forall, Pos
from sgap_jax.compiler.notation.expr import Assign, IndexVar
from sgap_jax.compiler.notation.nest import paths


class OutputLoops:
    """`path`: the loops around the one assignment to the output, from the outermost on."""

    def __init__(self, expression: Assign, body: Body, relations: Relations):
        self.expression, self.body, self.relations = expression, body, relations
        name, storage = expression.output.tensor, relations.storage
        found = [(path, a) for path, a in paths(body) if a.target.tensor == name]
        if len(found) != 1:
            raise NotImplementedError(f"{name} is assigned in {len(found)} places, expected one")
        self.path, self.assignment = found[0]
        self.variables = {loop.var for loop in self.path}
        self.sparse_output = expression.output.format is not None
        # What says which element of the output it is.
        self.element = expression.output.indices
        if self.sparse_output:
            self.element = (*self.element, *storage.variables[: expression.shared])
        self.positions = [r for r in relations.all if isinstance(r, Pos)]

    def loops_of(self, var: IndexVar) -> set[IndexVar]:
        """The loops that a variable's value comes from. Where the schedule does not split an index
        that is stored in blocks, those of the index for its blocks and for what is within them."""
        found, made = self.relations.loops_of(var, self.variables), self.relations.source(var)
        if not found and isinstance(made, cin.Split) and made in self.relations.storage.splits:
            return self.relations.loops_of(made.parent, self.variables)
        return found

    def changed_by(self, loop: Forall) -> set[IndexVar]:
        """The variables of the output's element that change from one iteration to the next."""
        return {var for var in self.element if loop.var in self.loops_of(var)}

    def whole(self, level: IndexVar) -> IndexVar:
        """The index that a level stores; of a level of blocks, the index that is in blocks."""
        relation = self.relations.source(level)
        return relation.parent if isinstance(relation, cin.Split) else level

    def depends(self, var: IndexVar, loop: IndexVar) -> bool:
        """Whether a coordinate changes along a loop, if only because its segment does."""
        levels = self.relations.levels
        parts = [
            number
            for number, level in enumerate(levels)
            if self.relations.is_stored(level) and var in (level, self.whole(level))
        ]
        above = levels[: max(parts)] if parts else ()
        return any(loop in self.loops_of(part) for part in (var, *above))

    def owned(self, loop: Forall) -> bool:
        """Whether no two iterations of a loop meet in one element of the output."""
        changed = {var for var in self.expression.indices if loop.var in self.loops_of(var)}
        if not changed or not changed <= set(self.expression.output.indices):
            return False
        if self.sparse_output:
            return True
        storage = self.relations.storage
        for pos in self.positions:
            if loop.var not in self.loops_of(pos.position):
                continue
            first, last = self.relations.levels_of(pos)
            if storage.repeats[last]:
                return False
            # No barrier between threads: an element must be of one thread under every parent.
            above = {self.whole(level) for level in storage.variables[:first]}
            threads = loop.unit in (GPU_WARP, GPU_THREAD)
            if threads and not above <= set(self.expression.output.indices):
                return False
        return True

    def in_order(self, loop: Forall, changed: list[IndexVar]) -> bool:
        """Whether the place in the output does not decrease from one iteration to the next."""
        if self.sparse_output or not changed:
            return True
        modes = self.relations.storage.modes
        for pos in self.positions:
            if loop.var in self.loops_of(pos.position):
                first, last = self.relations.levels_of(pos)
                return changed == modes[first : first + len(changed)] and last < len(modes)
        fused = [r.fused for r in self.relations.all if isinstance(r, cin.Fuse)]
        return len(changed) == 1 and not any(loop.var in self.loops_of(var) for var in fused)

    def tracked_positions(self, var: IndexVar) -> Pos | None:
        """The positions of several levels that a loop of `var` goes through one after the other, so
        that their parents need no search: it is serial, or its lanes share segments."""
        for pos in self.positions:
            loops = self.loops_of(pos.position)
            inner = [loop for loop in self.path if loop.var in loops]
            if inner and inner[-1].var == var:
                first, last = self.relations.levels_of(pos)
                if first < last and (inner[-1].unit is None or self.segment_steps(inner[-1])):
                    return pos
        return None

    def changes_by_segment(self, loop: Forall) -> bool:
        """Whether a loop over positions comes to another element only where a segment ends."""
        pos = self.tracked_positions(loop.var)
        return pos is not None and self._only_parents(pos, self.changed_by(loop))

    def _only_parents(self, pos: Pos, changed: set[IndexVar]) -> bool:
        """Whether all that changes along positions are coordinates of the levels above the last."""
        storage = self.relations.storage
        if self.sparse_output:
            return False
        if any(loop.group is not None for loop in self.path):
            return False  # the threads of a group end their segments at different times
        first, last = self.relations.levels_of(pos)
        outer = set(storage.variables[first:last])
        # An output index with a block changes with its outer part.
        outer |= {
            split.parent
            for split in self.relations.all
            if isinstance(split, cin.Split) and split.outer in outer
        }
        return changed <= outer and storage.is_compressed(last)

    def segment_steps(self, loop: Forall) -> list[IndexVar]:
        """The variables from a loop's to that of its positions, if it becomes one loop over the
        segments and one over the positions of each (segment_loops.py); else [].

        It has a sum for each segment of one level. Not on a GPU: threads would wait for the longest
        segment.
        """
        lanes = loop.unit == CPU_VECTOR and loop.race == cin.PARALLEL_REDUCTION
        storage, names = self.relations.storage, [other.var for other in self.path]
        if not (lanes or loop.unit is None) or loop.var not in names:
            return []
        if {other.unit for other in self.path} & {GPU_BLOCK, GPU_WARP, GPU_THREAD}:
            return []
        if any(self.changed_by(inner) for inner in self.path[names.index(loop.var) + 1 :]):
            return []
        for pos in self.positions:
            steps = self.relations.unit_steps(loop.var, pos.position)
            first, last = self.relations.levels_of(pos)
            if steps and first == last - 1 and storage.is_compressed(last):
                changed = self.changed_by(loop)
                return steps if changed and self._only_parents(pos, changed) else []
        return []

    def owns_segments(self, pos: Pos) -> bool:
        """Whether no one else adds to the element of a segment that is not cut by a tile."""
        storage, outputs = self.relations.storage, set(self.expression.output.indices)
        first, last = self.relations.levels_of(pos)
        loops = self.loops_of(pos.position)
        above = {self.whole(level) for level in storage.variables[first:last]}
        shared = [loop for loop in self.path if loop.unit != CPU_VECTOR and not self.owned(loop)]
        return (
            above <= outputs
            and not storage.repeats[last - 1]
            and all(loop.var in loops for loop in shared)
        )
