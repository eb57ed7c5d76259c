"""Every schedule of the conformance list can be expressed, and prints as specified."""

import pickle
import re
import xml.etree.ElementTree as xml
from fractions import Fraction

import compiler_chains as chains
import pytest
from compiler_chains import SPMM, SPMV

from sgap_jax import BCSR, COO, CSC, CSR, AtomicParallelism, ScheduleError
from sgap_jax.compiler.notation.expr import Assign, Tensor, assign, index_vars
from sgap_jax.compiler.presets import cpu, cpu_entries, cpu_fibers, spmm_point
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format


def printed(schedules):
    return "".join(f"# {name}\n{schedule}\n" for name, schedule in schedules.items())


@pytest.mark.parametrize(
    "name,made",
    [("chains", chains.rows), ("presets", chains.gpu_presets), ("cpu", chains.cpu_presets)],
)
def test_golden(name, made, golden):
    golden.text(f"schedules_{name}.txt", printed(made()))


@pytest.mark.parametrize(
    "subscripts,format,reason",
    [
        ("ij,jk->ik", CSR, "not a sum for each row"),
        ("ij,j->i", CSC, "not a sum for each row"),
        ("ij,j->i", COO, "not a sum for each row"),
        ("ijk->i", CSF(3), "no operand is a matrix"),
        ("ij,j->i", None, "no operand is a matrix"),
    ],
)
def test_entries_are_those_of_a_matrix_and_vectors(subscripts, format, reason):
    expression = assign(subscripts, {} if format is None else {"A": format})
    with pytest.raises(ScheduleError, match=reason):
        cpu_entries(expression)


@pytest.mark.parametrize(
    "subscripts,formats,reason",
    [
        ("ijk,kr->ijr", {"A": CSF(3)}, "not a sum of vectors for each slice"),
        ("ijk,ir,kr->jr", {"A": CSF(3)}, "not a sum of vectors for each slice"),
        ("ij,j->i", {"A": CSR}, "not a sum of vectors for each slice"),
        ("ij,jk->ik", {"A": COO}, "not a sum of vectors for each slice"),
        ("ij,jk->ik", {"A": BCSR(2, 2)}, "not a sum of vectors for each slice"),
        ("ij,jk->ik", {}, "no sparse operand, or no dense output"),
        (
            "ijk,kr->ijr",
            {"A": CSF(3), "C": Format((Compressed, Compressed, Dense))},
            "no dense out",
        ),
    ],
)
def test_fibers_are_those_of_slices(subscripts, formats, reason):
    with pytest.raises(ScheduleError, match=reason):
        cpu_fibers(assign(subscripts, formats))


def test_presets_find_names_for_their_loops():
    """The presets' loop names must not clash with an expression's indices or tensor."""
    f, task, within, fiber = index_vars("f task within fiber")
    A, x, y = Tensor("A", CSF(3)), Tensor("product"), Tensor("products")
    text = str(cpu_fibers(Assign(y[f, within], A[f, task, fiber] * x[fiber, within])))
    assert "fuse(f, task, f_)" in text and "split(fiber_, task_, within_, 256)" in text
    for staged in (False, True):
        s = cpu_entries(Assign(y[f], Tensor("A", CSR)[f, task] * x[task]), staged=staged)
        assert "split(entry, task_, inner, 2048)" in str(s)
        assert ("products_" in str(s)) == staged
    chunk, row, column = index_vars("chunk row column")
    matrix = Tensor("A", CSR)[row, chunk]
    assert "split(row, chunk_, row_, 16)" in str(cpu(Assign(y[row], matrix * x[chunk])))
    across = str(cpu(Assign(y[chunk, column], matrix * x[row, column])))
    assert "split(column, chunk_, column_, 64)" in across


def test_a_schedule_is_a_value():
    i, j, k = index_vars("i j k")
    A, B, C = Tensor("A", CSR), Tensor("B"), Tensor("C")
    one = Schedule(assign("ij,jk->ik", {"A": CSR})).split(i, "i0", "i1", 4).pos(j, "jp", A)
    same = Schedule(SPMM).split("i", "i0", "i1", 4).pos("j", "jp", A[i, j])
    assert one == same and hash(one) == hash(same) and len({one, same}) == 1
    assert one != same.reorder("i0", "i1", "jp", "k") != same
    assert pickle.loads(pickle.dumps(one)) == one
    assert Schedule(one.expression, one.statement) == one
    assert str(Schedule(SPMM)) == "forall(i, forall(k, forall(j, C(i,k) += A(i,j) * B(j,k))))"
    assert (C[i, k], A[i, j] * B[j, k]) == (SPMM.output, SPMM.factors)


@pytest.mark.parametrize(
    "subscripts,format,order",
    [
        ("ij,jk->ik", CSC, "jik"),
        ("ij,jk->ki", CSC, "kji"),
        ("ikl,lj,kj->ij", CSF(3), "ijkl"),
        ("lki,ij->jl", CSF(3), "jlki"),
        ("ij,jk->ik", None, "ikj"),
    ],
)
def test_loops_of_an_unscheduled_expression(subscripts, format, order):
    s = Schedule(assign(subscripts, {} if format is None else {"A": format}))
    assert re.findall(r"forall\((\w),", str(s)) == list(order)


def test_points_without_a_chain():
    for point, nearest in (
        (AtomicParallelism(row=Fraction(1, 64), group=8), "{<1/32 row, 1 col>, 8}"),
        (AtomicParallelism(row=2, group=4), "{<2 row, 1 col>, 1}"),
        (AtomicParallelism(nnz=1, group=8, tile_size=4), "{<1 nnz, 1 col>, 8}"),
    ):
        with pytest.raises(NotImplementedError, match=re.escape(f"nearest is {nearest}")):
            spmm_point(SPMM, point, 4)
    with pytest.raises(ScheduleError, match="expected an Assign"):
        Schedule("ij,j->i")
    with pytest.raises(ScheduleError, match="a point of the space is of"):
        spmm_point(SPMV, AtomicParallelism(nnz=1), 4)


def test_ways_there_and_back():
    s = Schedule(SPMV).pos("j", "jp", "A").split("jp", "j0", "j1", 4).coord("j1", "c")
    assert str(s).endswith("pos(j, jp, A(i,j)) and split(jp, j0, j1, 4) and coord(j1, c))")
    with pytest.raises(ScheduleError, match="depends on what A"):
        s.unroll("c")


def test_provenance_is_drawn():
    graph = chains.rows()["12"].provenance()
    assert str(graph).splitlines() == [
        "i, k, j",
        "  i, j --[fuse]--> f",
        "  f --[pos A(i,j)]--> fpos (pos)",
        "  fpos (pos) --[split 64]--> block (pos), fpos1 (pos)",
        "  fpos1 (pos) --[split 8]--> warp (pos), nnz (pos)",
        "  k --[split 32]--> dense, thread",
        "  dense --[bound 4]--> dense_val",
    ]
    assert graph._repr_svg_() == graph.svg()
    picture = xml.fromstring(graph.svg())
    space = "{http://www.w3.org/2000/svg}"
    words = [text.text for text in picture.iter(f"{space}text")]
    assert sorted(words) == sorted(
        [
            "i",
            "k",
            "j",
            "f",
            "fpos",
            "block",
            "fpos1",
            "warp",
            "nnz",
            "dense",
            "thread",
            "dense_val",
        ]
        + ["fuse", "pos A(i,j)", "split 64", "split 8", "split 32", "bound 4"]
    )


def test_boxes_do_not_overlap():
    for schedule in chains.rows().values():
        picture = xml.fromstring(schedule.provenance().svg())
        boxes = [
            {n: int(box.get(n)) for n in ("x", "y", "width")}
            for box in picture.iter("{http://www.w3.org/2000/svg}rect")
        ]
        for n, one in enumerate(boxes):
            for other in boxes[:n]:
                assert one["y"] != other["y"] or abs(one["x"] - other["x"]) >= one["width"]
        assert all(0 <= b["x"] <= int(picture.get("width")) - b["width"] for b in boxes)
