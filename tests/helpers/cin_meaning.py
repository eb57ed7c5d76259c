"""A brute-force oracle of concrete index notation: every loop runs over its whole extent, and an
iteration counts where its variables agree on the indices and the entry is stored."""

import itertools

import numpy as np

from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import children, parents
from sgap_jax.compiler.notation.nest import level_indices

REDUCE = {"+": np.add, "max": np.maximum, "min": np.minimum}
FILL = {"+": 0.0, "max": -np.inf, "min": np.inf, None: 0.0}


class Meaning:
    """`stored`: the coordinates of the sparse operand, one row each."""

    def __init__(self, schedule, sizes, arrays, stored=()):
        self.schedule, self.graph = schedule, schedule.provenance()
        self.sizes, self.arrays = sizes, dict(arrays)
        self.segment = None  # the scalar of a segment, its consumer, and the element it belongs to
        sparse, self.levels = schedule.expression.sparse, ()
        if sparse is not None:
            self.levels = level_indices(sparse.format, sparse.indices)
            order = [sparse.indices.index(index) for index in self.levels]
            entries = sorted(tuple(int(row[mode]) for mode in order) for row in stored)
            depths = range(1, len(order) + 1)
            self.prefixes = [sorted({entry[:depth] for entry in entries}) for depth in depths]

    def run(self):
        output, op = self.schedule.expression.output, self.schedule.expression.reduction
        shape = [self.sizes[index.name] for index in output.indices]
        fill = FILL[op] if self.schedule.expression.reduced else 0.0
        self.arrays[output.tensor] = np.full(shape, fill)
        self.execute(self.schedule.statement.body, {})
        return self.arrays[output.tensor]

    def execute(self, body, env):
        match body:
            case cin.Forall():
                for value in range(self.extent(body.var)):
                    self.execute(body.body, {**env, body.var: value})
            case cin.Where():
                at = self.recover(env)
                if at is None or not self.is_stored(at):
                    return  # enclosing loops run over stored entries only
                leaf = body.producer
                while not isinstance(leaf, cin.Assignment):
                    leaf = leaf.consumer if isinstance(leaf, cin.Where) else leaf.body
                shape = [self.extent(index) for index in leaf.target.indices]
                self.arrays[leaf.target.tensor] = np.full(shape, FILL[leaf.op])
                consumer = body.consumer
                if isinstance(consumer, cin.Assignment) and not all(
                    index in at for index in consumer.target.indices
                ):
                    self.segment = [leaf, consumer, None]
                    self.execute(body.producer, env)
                    self.flush()
                    self.segment = None
                    return
                self.execute(body.producer, env)
                self.execute(consumer, env)
            case cin.Intrinsic():
                self.execute(body.body, env)
            case cin.Assignment():
                self.assign(body, env)

    def assign(self, leaf, env):
        at = self.recover(env)
        if at is None:
            return
        accesses = (leaf.target, *leaf.factors)
        if any(a.format is not None for a in accesses) and not self.is_stored(at):
            return
        place, *places = (tuple(at[index] for index in access.indices) for access in accesses)
        value = np.prod(
            [self.arrays[a.tensor][where] for a, where in zip(leaf.factors, places, strict=True)]
        )
        if self.segment is not None and self.segment[0] == leaf:
            element = tuple(at[index] for index in self.segment[1].target.indices)
            if self.segment[2] != element:
                self.flush()
            self.segment[2] = element
        target = self.arrays[leaf.target.tensor]
        target[place] = value if leaf.op is None else REDUCE[leaf.op](target[place], value)

    def flush(self):
        """Adds the scalar of a finished segment to the element it belongs to."""
        leaf, consumer, element = self.segment
        if element is not None:
            target, scalar = self.arrays[consumer.target.tensor], self.arrays[leaf.target.tensor]
            target[element] = REDUCE[consumer.op](target[element], scalar[()])
            scalar[()] = FILL[leaf.op]

    def is_stored(self, at):
        """False where the variables determine an entry that is not stored."""
        if not self.levels or not all(index in at for index in self.levels):
            return True
        return tuple(at[index] for index in self.levels) in self.prefixes[-1]

    def extent(self, var):
        match self.graph.origin(var):
            case None:
                return self.sizes[var.name]
            case cin.Split(parent, outer, _, size):
                return -(-self.extent(parent) // size) if var == outer else size
            case cin.Divide(parent, outer, _, parts):
                return parts if var == outer else -(-self.extent(parent) // parts)
            case cin.Fuse(outer, inner):
                return self.extent(outer) * self.extent(inner)
            case cin.Pos(coordinate):
                return len(self.prefixes[self.deepest(coordinate)])
            case cin.Coord(position):
                return self.extent(self.graph.position(position).coordinate)
            case cin.Bound(parent, _, size):
                assert self.extent(parent) == size
                return size
            case cin.Precompute(whole):
                return self.extent(whole)

    def deepest(self, coordinate):
        return self.levels.index(self.graph.roots(coordinate)[-1])

    def recover(self, env):
        """Computes every variable from the loop variables; None where a guard fails."""
        at, said, tiled = dict(env), [], []
        for relation in reversed(self.schedule.statement.relations):
            made = children(relation)
            if not all(var in at for var in made):
                continue
            below = [at[var] for var in made]
            match relation:
                case cin.Split():
                    found = [below[0] * relation.size + below[1]]
                case cin.Divide():
                    found = [below[0] * self.extent(relation.inner) + below[1]]
                case cin.Fuse():
                    found = divmod(below[0], self.extent(relation.inner))
                case cin.Pos():
                    depth = self.deepest(relation.coordinate)
                    if below[0] >= len(self.prefixes[depth]):
                        return None
                    entry = self.prefixes[depth][below[0]]
                    roots = dict(zip(self.levels, entry, strict=False))
                    said += roots.items()
                    found = [self.forward(relation.coordinate, roots)]
                case cin.Coord():
                    tiled.append(relation.position)
                    var = self.graph.position(relation.position).coordinate
                    if at.setdefault(var, below[0]) != below[0]:
                        return None
                    continue
                case _:
                    found = below
            for var, value in zip(parents(relation), found, strict=True):
                if at.setdefault(var, value) != value:
                    return None
        for position in tiled:  # within the tile of the enclosing loops
            for _, relation in self.graph.lineage(position):
                for var in children(relation):
                    if var in at and self.forward(var, at) != at[var]:
                        return None
        fits = all(value < self.extent(var) for var, value in at.items())
        return at if fits and all(at.get(var, value) == value for var, value in said) else None

    def forward(self, var, roots):
        """Computes a variable from the indices that it derives from."""
        relation = self.graph.origin(var)
        if relation is None:
            return roots[var]
        if isinstance(relation, cin.Pos):
            depth = self.deepest(relation.coordinate)
            entry = tuple(roots[index] for index in self.levels[: depth + 1])
            return self.prefixes[depth].index(entry) if entry in self.prefixes[depth] else -1
        above = [self.forward(parent, roots) for parent in parents(relation)]
        match relation:
            case cin.Split(size=size) | cin.Divide(parts=size):
                if isinstance(relation, cin.Divide):
                    size = self.extent(relation.inner)
                return above[0] // size if var == relation.outer else above[0] % size
            case cin.Fuse():
                return above[0] * self.extent(relation.inner) + above[1]
        return above[0]


def operands(expression, sizes, seed):
    """Random dense arrays of the operands, and the coordinates at which the sparse one is not
    zero."""
    rng, arrays, stored = np.random.default_rng(seed), {}, ()
    for factor in expression.factors:
        shape = [sizes[index.name] for index in factor.indices]
        array = rng.uniform(-1, 1, shape)
        if factor.format is not None:
            array *= rng.random(shape) < 0.5
            array[rng.integers(shape[0])] = 0  # an empty slice
            stored = np.argwhere(array)
        arrays[factor.tensor] = array
    return arrays, stored


def direct(expression, sizes, arrays, stored):
    """Evaluates the expression itself, index by index."""
    shape = [sizes[index.name] for index in expression.output.indices]
    op = expression.reduction
    out = np.full(shape, FILL[op] if expression.reduced else 0.0)
    entries = {tuple(map(int, row)) for row in stored}
    for values in itertools.product(*(range(sizes[i.name]) for i in expression.indices)):
        at = dict(zip(expression.indices, values, strict=True))
        where = [tuple(at[i] for i in factor.indices) for factor in expression.factors]
        pairs = list(zip(expression.factors, where, strict=True))
        if any(f.format is not None and place not in entries for f, place in pairs):
            continue
        value = np.prod([arrays[f.tensor][place] for f, place in pairs])
        place = tuple(at[i] for i in expression.output.indices)
        out[place] = REDUCE[op](out[place], value) if expression.reduced else value
    return out
