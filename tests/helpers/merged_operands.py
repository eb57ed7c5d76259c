"""Operands of expressions whose coordinates are merged, and what the expressions are, by NumPy."""

import jax.numpy as jnp
import numpy as np
from compiler_tensors import stored
from loop_interpreter import interp

from sgap_jax.compiler.lowering.lower import lower


class Merged:
    """Operands of small integers, below `most`, so that every sum is exact. Each sparse operand has
    a pattern of its own, and `spare` positions of junk behind those that are used; `patterns` gives
    some of them."""

    def __init__(
        self, expression, sizes, density=0.4, spare=0, dtype="float32", seed=0, patterns=(), most=4
    ):
        random, self.expression, self.sizes = np.random.default_rng(seed), expression, sizes
        self.inputs, self.positions, self.dense, self.there = {}, {}, {}, {}
        for access in expression.accesses:
            shape = [sizes[index.name] for index in access.indices]
            tensor = random.integers(1, most, shape) * random.choice([-1, 1], shape)
            there = np.ones(shape, bool)
            arrays = {access.tensor: tensor.reshape(-1)}
            if access.format is not None:
                there = random.random(shape) < density
                if access.tensor in dict(patterns):
                    there = dict(patterns)[access.tensor]
                tensor = np.where(there, 1 if access.pattern else tensor, 0)
                arrays, positions = stored(access, there, tensor, spare)
                self.positions[access.tensor] = positions
            self.dense[access], self.there[access] = tensor, there
            with np.errstate(invalid="ignore"):  # NaN casts to an arbitrary integer
                for name, array in arrays.items():
                    index = name.endswith(("_pos", "_crd"))
                    self.inputs[name] = array if index else array.astype(jnp.dtype(dtype))
        self.want = self.expected().reshape(-1).astype(np.float64)
        if (holder := expression.holder) is not None:
            arrays, _ = stored(
                holder, self.there[holder], self.want.reshape(self.there[holder].shape), spare
            )
            self.want = np.nan_to_num(arrays[f"{holder.tensor}_vals"])  # spare capacity stays zero

    def expected(self):
        e = self.expression
        letters = {index: chr(ord("a") + n) for n, index in enumerate(e.indices)}
        word = lambda indices: "".join(letters[i] for i in indices)
        shape = [self.sizes[i.name] for i in e.output.indices]
        if e.reduction != "+":
            return self.extremum(word, shape)
        total = np.zeros(shape, np.int64)
        for term in e.products:
            own = {i for x in term.factors for i in x.indices}
            left = [i for i in e.output.indices if i in own]
            words = ",".join(word(x.indices) for x in term.factors)
            part = np.einsum(f"{words}->{word(left)}", *(self.dense[x] for x in term.factors))
            each = [self.sizes[i.name] if i in left else 1 for i in e.output.indices]
            total = total + (-1 if term.negative else 1) * part.reshape(each)
        return total

    def extremum(self, word, shape):
        """Over what all factors store."""
        e = self.expression
        words = ",".join(word(x.indices) for x in e.factors) + "->" + word(e.indices)
        values = np.einsum(words, *(self.dense[x] for x in e.factors))
        there = np.einsum(words, *(self.there[x].astype(int) for x in e.factors)) > 0
        combine, nothing = (np.max, -np.inf) if e.reduction == "max" else (np.min, np.inf)
        axes = tuple(n for n, i in enumerate(e.indices) if i not in e.output.indices)
        return combine(np.where(there, values, nothing), axis=axes, initial=nothing).reshape(shape)

    def function(self, schedule, dtype="float32"):
        return lower(schedule, self.sizes, self.positions, dtype)

    def given(self, function):
        return {array.name: self.inputs[array.name] for array in function.inputs}

    def check(self, schedule, dtype="float32"):
        """The loops, run in the interpreter, against NumPy; gives the function."""
        function = self.function(schedule, dtype)
        found = interp.run(function, self.given(function))[self.expression.output.tensor]
        np.testing.assert_array_equal(found.astype(np.float64), self.want, f"{schedule}")
        return function
