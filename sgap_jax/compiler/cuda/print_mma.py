"""Tensor cores in CUDA C++: the tiles of cuda/loops/loops_octet.cuh, and the calls that add to and
store them."""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.loopir import Expr, Int, Mma, MmaStore
from sgap_jax.compiler.loop_ir.print_c import CText
from sgap_jax.schedules.tiles import OctetTile, features_of_load, sddmm_registers

# Threads that must fit on a multiprocessor -> (largest step in vectors of a product, most registers
# that a lane's values of a sampled product take). A lane then has 64, 128 or 255 registers; up to
# these limits NVRTC 13 does not spill on sm_80 to sm_100.
_ROOM = {1024: (0, 34), 512: (64, 80), 256: (128, 160)}


class TileText:
    """The text of the tile of an Mma whose right matrix gathers: rows of B for the product C = A B,
    or columns (rows of Y, if its features are contiguous) for the sampled product.

    Raises:
      NotImplementedError: the tile needs more registers than a lane has with so many warps.
      ValueError: operands for which the header has no tile.
    """

    def __init__(self, text: CText, mma: Mma, warps: int):
        self.text, self.mma = text, mma
        self.dtype = text.dtypes[mma.right.array]
        self.sampled = mma.right.columns.gather is not None
        if (mma.right.rows.gather is None) != self.sampled:
            raise ValueError(f"{text.function.name}: {mma.right} gathers along one side")
        length, columns, depth = mma.shape
        if self.sampled:
            tile = OctetTile(length, tile_n=columns, tile_k=depth)
            whole = mma.left.rows.stride % features_of_load(tile, self.dtype) == 0
            constants: list = [length, columns, depth, mma.right.rows.stride == 1, whole]
            held = sddmm_registers(tile, self.dtype)
        else:
            constants = [length, columns, depth, mma.right.rows.stride % 8 == 0]
            held = depth
        fitting = [t for t, room in _ROOM.items() if held <= room[self.sampled] and 32 * warps <= t]
        if not fitting:
            raise NotImplementedError(
                f"{text.function.name}: {warps} warps of a block have no registers for tiles of "
                f"{length} x {columns} in steps of {depth}; split by less, or give a block fewer "
                "warps"
            )
        self.blocks = max(fitting) // (32 * max(warps, 1))  # blocks on a multiprocessor
        name = "SampledTile" if self.sampled else "ProductTile"
        written = [str(c).lower() if isinstance(c, bool) else str(c) for c in constants]
        self.type = f"sgap::{name}<{', '.join([text.c_types[self.dtype], *written])}>"

    def line(self, statement: Mma | MmaStore) -> str:
        """The C++ call for a statement."""
        return self._multiply(statement) if isinstance(statement, Mma) else self._store(statement)

    def _multiply(self, mma: Mma) -> str:
        left, right, expr = mma.left, mma.right, self.text.expr
        if self.sampled:
            stride = max(right.rows.stride, right.columns.stride)
            arguments: list = [
                *(self._at(left.array, left.offset), expr(left.rows.first), left.rows.stride),
                *(self._at(right.array, right.offset), stride),
                *(right.columns.gather, expr(right.columns.first), expr(mma.columns)),
                *(expr(left.columns.first), expr(mma.depth)),
            ]
        else:
            arguments = [
                *(self._at(left.array, left.offset), right.rows.gather),
                *(expr(right.rows.first), expr(mma.depth)),
                *(self._at(right.array, right.offset), right.rows.stride),
                *(expr(right.columns.first), expr(mma.columns)),
            ]
        return f"{mma.tile}.Multiply({', '.join(map(str, arguments))});"

    def _store(self, store: MmaStore) -> str:
        target, expr = store.target, self.text.expr
        name = self.text.function.name
        out = self.text.dtypes[target.array]
        if store.op is None and out == self.dtype:
            put = f"sgap::Rounded<{'true' if self.sampled else self._whole}>"
        elif store.op == "+" and out == "float32":
            put = f"sgap::Added<sgap::{'Atomically' if store.atomic else 'Alone'}<sgap::Add>>"
        else:
            raise ValueError(f"{name}: a tile to {target.array}, which is {out}, by {store.op}")
        if self.sampled:
            arguments: list = [
                self._at(store.scale, store.offset) if store.scale else "nullptr",
                expr(target.columns.first),
                expr(store.columns),
            ]
        else:
            arguments = [expr(target.rows.first), target.rows.stride]
            arguments += [expr(target.columns.first), expr(store.columns)]
        written = ", ".join(map(str, [self._at(target.array, target.offset), *arguments]))
        return f"{store.tile}.Store<{put}>({written});"

    def _at(self, array: str, offset: Expr) -> str:
        return array if offset == Int(0) else f"{array} + {self.text.expr(offset)}"

    @property
    def _whole(self) -> str:
        return str(self.mma.right.rows.stride % 8 == 0).lower()
