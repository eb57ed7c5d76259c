"""How the loops move the element of the output that a sum belongs to: what lowering must know to
keep a sum (reductions.py), to track the ends of its segments and to guard what lanes share."""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.loopir import CPU_VECTOR, GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.lowering.relations import Relations
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Body, Forall, Pos
from sgap_jax.compiler.notation.expr import Assign, IndexVar
from sgap_jax.compiler.notation.nest import paths


class Movement:
    """The loops around the one assignment to the output (`path`), and what each of them moves."""

    def __init__(self, expression: Assign, body: Body, relations: Relations):
        self.expression, self.body, self.relations = expression, body, relations
        name = expression.output.tensor
        found = [(path, a) for path, a in paths(body) if a.target.tensor == name]
        if len(found) != 1:
            raise NotImplementedError(f"{name} is assigned in {len(found)} places, expected one")
        self.path, self.assignment = found[0]
        self.loops = {loop.var for loop in self.path}
        storage = relations.storage
        self.sparse_output = expression.output.format is not None
        self.moving = expression.output.indices
        if self.sparse_output and storage is not None:
            self.moving = (*self.moving, *storage.variables[: expression.shared])
        self.positions = [r for r in relations.all if isinstance(r, Pos)]

    def leaves(self, var: IndexVar) -> set[IndexVar]:
        """The loops that a variable comes from; of a block or within one, those of its index."""
        found = self.relations.leaves(var, self.loops)
        storage, made = self.relations.storage, self.relations.source(var)
        if not found and storage is not None and made in storage.splits:
            assert isinstance(made, cin.Split)
            return self.relations.leaves(made.parent, self.loops)
        return found

    def moved(self, loop: Forall) -> set[IndexVar]:
        """What the element of the output moves along with a loop."""
        return {var for var in self.moving if loop.var in self.leaves(var)}

    def whole(self, level: IndexVar) -> IndexVar:
        """The index that a level has the blocks of."""
        relation = self.relations.source(level)
        return relation.parent if isinstance(relation, cin.Split) else level

    def depends(self, var: IndexVar, loop: IndexVar) -> bool:
        """Whether a coordinate moves with a loop, be it only that its segment does."""
        levels = self.relations.levels
        parts = [
            number
            for number, level in enumerate(levels)
            if self.relations.is_stored(level) and var in (level, self.whole(level))
        ]
        above = levels[: max(parts)] if parts else ()
        return any(loop in self.leaves(part) for part in (var, *above))

    def owned(self, loop: Forall) -> bool:
        """Whether no two iterations meet in one element of the output."""
        moves = {var for var in self.expression.indices if loop.var in self.leaves(var)}
        if not moves or not moves <= set(self.expression.output.indices):
            return False
        if self.sparse_output:
            return True
        storage = self.relations.storage
        for pos in self.positions:
            if storage is None or loop.var not in self.leaves(pos.position):
                continue
            first, last = self.relations.levels_of(pos)
            if storage.repeats[last]:
                return False
            # Threads go their own ways: the element must be of one thread under every parent.
            above = {self.whole(level) for level in storage.variables[:first]}
            threads = loop.unit in (GPU_WARP, GPU_THREAD)
            if threads and not above <= set(self.expression.output.indices):
                return False
        return True

    def in_order(self, loop: Forall, moved: list[IndexVar]) -> bool:
        """Whether the place in the output does not decrease from one iteration to the next."""
        if self.sparse_output or not moved:
            return True
        storage = self.relations.storage
        for pos in self.positions:
            if storage is not None and loop.var in self.leaves(pos.position):
                modes = storage.modes
                first, last = self.relations.levels_of(pos)
                return moved == modes[first : first + len(moved)] and last < len(modes)
        fused = [r.fused for r in self.relations.all if isinstance(r, cin.Fuse)]
        return len(moved) == 1 and not any(loop.var in self.leaves(var) for var in fused)

    def tracking(self, var: IndexVar) -> Pos | None:
        """The positions of several levels that run on, one after the other, in a serial loop, or in
        lanes that share runs."""
        for pos in self.positions:
            leaves = self.leaves(pos.position)
            inner = [loop for loop in self.path if loop.var in leaves]
            if inner and inner[-1].var == var:
                first, last = self.relations.levels_of(pos)
                if first < last and (inner[-1].unit is None or self.run_steps(inner[-1])):
                    return pos
        return None

    def only_tracked(self, var: IndexVar, moved: set[IndexVar]) -> bool:
        pos = self.tracking(var)
        return pos is not None and self._only_levels(pos, moved)

    def _only_levels(self, pos: Pos, moved: set[IndexVar]) -> bool:
        """Whether all that moves along positions does so with the levels above them."""
        storage = self.relations.storage
        if storage is None or self.sparse_output:
            return False
        if any(loop.group is not None for loop in self.path):
            return False  # the threads of a group end their segments at different times
        first, last = self.relations.levels_of(pos)
        outer = set(storage.variables[first:last])
        # An output index with a block is moved by its outer part.
        outer |= {
            split.parent
            for split in self.relations.all
            if isinstance(split, cin.Split) and split.outer in outer
        }
        return moved <= outer and storage.is_compressed(last)

    def run_steps(self, loop: Forall) -> list[IndexVar]:
        """The variables from a loop's to a position's, if it goes there run by run; or []. It keeps
        a sum for each position of one level, whose runs are one after the other. On a GPU, threads
        would wait for the longest run."""
        lanes = loop.unit == CPU_VECTOR and loop.race == cin.PARALLEL_REDUCTION
        storage, names = self.relations.storage, [other.var for other in self.path]
        if storage is None or not (lanes or loop.unit is None) or loop.var not in names:
            return []
        if {other.unit for other in self.path} & {GPU_BLOCK, GPU_WARP, GPU_THREAD}:
            return []
        if any(self.moved(inner) for inner in self.path[names.index(loop.var) + 1 :]):
            return []
        for pos in self.positions:
            steps = self.relations.steps(loop.var, pos.position)
            first, last = self.relations.levels_of(pos)
            if steps and first == last - 1 and storage.is_compressed(last):
                moved = self.moved(loop)
                return steps if moved and self._only_levels(pos, moved) else []
        return []

    def owns_runs(self, pos: Pos) -> bool:
        """Whether a run that is not cut has its element to itself."""
        storage, outputs = self.relations.storage, set(self.expression.output.indices)
        assert storage is not None
        first, last = self.relations.levels_of(pos)
        leaves = self.leaves(pos.position)
        above = {self.whole(level) for level in storage.variables[first:last]}
        shared = [loop for loop in self.path if loop.unit != CPU_VECTOR and not self.owned(loop)]
        return (
            above <= outputs
            and not storage.repeats[last - 1]
            and all(loop.var in leaves for loop in shared)
        )
