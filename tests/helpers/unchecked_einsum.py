"""einsum over the malformed structures of unchecked_structures.py, and its oracle in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from unchecked_structures import KINDS, entries, made_under_jit, spoiled

from sgap_jax import Format, einsum
from sgap_jax.formats.levels import require_stored

SIZES = {"i": 7, "j": 9, "k": 5, "r": 11, "s": 3}


def stored(format, word):
    return require_stored(format, len(word), "test")


class Case:
    """One expression over one malformed structure, with NaN wherever an entry takes no part."""

    def __init__(self, subscripts, format, kind, seed=0, fibers=0):
        self.subscripts, inputs = subscripts, subscripts.partition("->")[0]
        self.output = subscripts.partition("->")[2]
        self.word, *self.words = inputs.split(",")
        self.format = stored(format, self.word)
        self.shape = tuple(SIZES[i] for i in self.word)
        self.arrays, self.stored_shape = spoiled(self.format, self.shape, kind, seed)
        self.entries = entries(self.format, self.arrays, self.shape)
        self.fibers = fibers
        rng = np.random.default_rng(seed + 1)
        self.nnz = int(np.prod(self.stored_shape))
        self.values = np.full(self.nnz, np.nan, np.float32)
        for place, *_ in self.entries:
            self.values[place] = rng.standard_normal()
        self.dense = [
            rng.standard_normal([SIZES[i] for i in w]).astype(np.float32) for w in self.words
        ]
        # [entries that take part, ...]: the place of each in the values.
        self.places = np.array([place for place, *_ in self.entries], int)
        self.chosen = {
            index: np.array([c[n] for _, c, _ in self.entries], int)
            for n, index in enumerate(self.word)
        }
        if fibers:
            self.nodes = np.array([nodes[fibers - 1] for *_, nodes in self.entries], int)

    def call(self, values, *dense, arrays=None, **options):
        A = made_under_jit(self.format, arrays, values.reshape(self.stored_shape), self.shape)
        out = einsum(self.subscripts, A, *dense, fibers=bool(self.fibers), **options)
        return out.values.reshape(-1, *self._tail()) if hasattr(out, "values") else out

    def _tail(self):
        return [SIZES[i] for i in self.output[self.fibers :]] if self.fibers else []

    def given(self):
        return jax.tree.map(jnp.asarray, (self.values, self.arrays, self.dense))

    def products(self, skip=None):
        """The products [entries that take part, dense indices...] and the dense indices; without
        factor `skip`."""
        dense = [i for i in "rs" if i in self.subscripts]
        total = np.ones((len(self.entries), *[SIZES[i] for i in dense]))
        factors = [(self.word, self.values), *zip(self.words, self.dense, strict=True)]
        for n, (word, x) in enumerate(factors):
            if n == skip:
                continue
            if n == 0:
                term, kept = x[self.places].astype(np.float64), ""
            else:
                kept = [i for i in word if i not in self.chosen]
                term = np.transpose(
                    np.asarray(x, np.float64),
                    [word.index(i) for i in (*[i for i in word if i in self.chosen], *kept)],
                )
                at = tuple(self.chosen[i] for i in word if i in self.chosen)
                term = term[at] if at else np.broadcast_to(term, (len(self.entries), *term.shape))
            shape = [len(self.entries), *[SIZES[i] if i in kept else 1 for i in dense]]
            total = total * term.reshape(shape)
        return total, dense

    def reduced(self, products, dense, word, reduction="sum"):
        """Reduces products over the indices that `word` lacks; for the sparse operand's own word,
        the result is at the entries."""
        keep = [i for i in dense if i in word]
        over = tuple(n + 1 for n, i in enumerate(dense) if i not in word)
        products = getattr(np, reduction)(products, axis=over) if over else products
        empty = {"sum": 0, "max": -np.inf, "min": np.inf}[reduction]
        if word == self.word:
            out = np.zeros(self.nnz)
            out[self.places] = products
            return out
        if self.fibers and word == self.output:
            count = self.arrays[2 * self.fibers - 1].shape[0]
            out, at = np.full((count, *products.shape[1:]), empty, float), (self.nodes,)
            names = ["*", *keep]
            word = "*" + word[self.fibers :]
        else:
            own = [i for i in word if i in self.chosen]
            shape = [SIZES[i] for i in own]
            out = np.full((*shape, *products.shape[1:]), empty, float)
            at, names = tuple(self.chosen[i] for i in own), [*own, *keep]
            if not own:
                total = getattr(np, reduction)(products, axis=0, initial=empty)
                return np.transpose(total, [names.index(i) for i in word])
        ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduction]
        ufunc.at(out, at, products)
        return np.transpose(out, [names.index(i) for i in word])

    def wanted(self, reduction="sum"):
        out = self.reduced(*self.products(), self.output, reduction)
        if self.fibers and reduction != "sum":
            out[~self.there()] = 0
        return out

    def there(self):
        """Which fibers are stored: those whose nodes take part, with or without entries below."""
        inner = self.format.levels[: self.fibers]
        order = tuple(np.argsort(np.argsort(self.format.modes[: self.fibers])).tolist())
        outer = Format(inner, order)
        shape = [0] * self.fibers
        for n, mode in enumerate(self.format.modes[: self.fibers]):
            shape[order[n]] = self.shape[mode]
        count = self.arrays[2 * self.fibers - 1].shape[0]
        found = np.zeros(count, bool)
        for place, *_ in entries(outer, self.arrays[: 2 * self.fibers], shape):
            found[place] = True
        return found

    def gradient(self, n, weights):
        """The gradient of sum(weights * result) in factor n."""
        products, dense = self.products(skip=n)
        names = self.output
        if names == self.word:
            at = weights[self.places].reshape(-1, *[1] * len(dense))
        else:
            own = [i for i in names if i in self.chosen]
            if self.fibers:
                at, own = weights[self.nodes], []
                names = names[self.fibers :]
            else:
                at = np.transpose(
                    weights, [names.index(i) for i in (*own, *[i for i in names if i not in own])]
                )[tuple(self.chosen[i] for i in own)]
            kept = [i for i in names if i not in own]
            at = np.transpose(at, [0, *[1 + kept.index(i) for i in dense if i in kept]])
            at = at.reshape(len(self.entries), *[SIZES[i] if i in kept else 1 for i in dense])
        word = self.word if n == 0 else self.words[n - 1]
        output, fibers = self.output, self.fibers
        self.fibers = 0
        found = self.reduced(products * at, dense, word)
        self.output, self.fibers = output, fibers
        return found


def every(subscripts, format, seed=0, fibers=0):
    """One case of each kind, all of the same sizes, so that one program serves them."""
    return [Case(subscripts, format, kind, seed, fibers) for kind in KINDS]


def near(got, want, kind, tolerance=1e-4):
    got = np.asarray(got).reshape(want.shape)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=kind)
