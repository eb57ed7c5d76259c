"""What the tests run in other processes: python programs.py NAME [FILE ...] [--emulated]

sample         products of each kind of kernel and every operation's default, checked; three times
call           an exported program (FILE), on operands (FILE.npz): writes FILE.npy
"""

import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from battery import BATTERY, array, cast
from emulated_launch import emulate
from spmm_oracle import dense_operand, oracle
from tolerance import assert_within

from sgap_jax import Schedule, row_sum, sddmm, sparse_softmax, spmm
from sgap_jax.schedules.emulated import Emulated

POINTS = ("{<2 row, 2 col>, 1}", "{<1/8 row, 4 col>, 4}", "{<4 nnz, 4 col>, 1}")
POINTS += ("{<1 nnz, 1 col>, 8}",)


def sample(emulated):
    done = 0
    for name, text in ((n, t) for n in ("padded", "every_length") for t in (None, *POINTS)):
        case, point = BATTERY[name], None if text is None else Schedule.parse(text)
        B = dense_operand(case, 7)
        schedule = Emulated(emulate, point) if emulated else point
        step = jax.jit(lambda A, B, s=schedule: spmm(A, B, schedule=s))
        for _ in range(1 if emulated else 3):  # a graph is captured at the second
            C = step(array(case, "float32"), cast(B, "float32"))
        assert_within(C, *oracle(case, "float32", B))
        done += 1
    A, default = array(BATTERY["every_length"], "float32"), Emulated(emulate) if emulated else None

    @jax.jit
    def attention(A, X, Y):
        S = sparse_softmax(sddmm(A, X, Y, schedule=default), schedule=default)
        return spmm(S, Y, schedule=default), row_sum(S, schedule=default)

    X, Y = (jnp.ones((size, 5), jnp.float32) for size in A.shape)
    for _ in range(3):
        C, sums = attention(A, X, Y)
    full = np.diff(np.asarray(A.row_offsets)) > 0  # rows without entries are zero
    np.testing.assert_allclose(sums, full, rtol=1e-5)
    np.testing.assert_allclose(C, np.repeat(full[:, None], 5, 1), rtol=1e-5)
    print(f"sample: {done + 1} programs are right")


def call(file):
    exported = jax.export.deserialize(bytearray(open(file, "rb").read()))
    operands = np.load(f"{file}.npz")
    np.save(f"{file}.npy", exported.call(operands["values"], operands["B"]))


if __name__ == "__main__":
    words = [word for word in sys.argv[2:] if word != "--emulated"]
    if sys.argv[1] == "sample":
        sample("--emulated" in sys.argv)
    else:
        call(*words)
