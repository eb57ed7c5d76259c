"""Instructions, loops and tensor operations of machine code, read from nvdisasm."""

import pytest
from cuda_sources import Loop, machine_code, parse_sass, ptx, require_nvdisasm

PRINTED = """
//--------------------- .text.k --------------------------
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "/some/folder/a.cuh", line 12
        /*0010*/                   S2R R0, SR_TID.X ;
.L_x_2:
        /*0020*/                   ISETP.GE.AND P0, PT, R0, 0x4, PT ;
	//## File "/some/folder/b.cuh", line 7 inlined at "/some/folder/a.cuh", line 12
.L_x_1:
        /*0030*/              @!P1 LDG.E.128.CONSTANT R4, desc[UR6][R8.64] ;
        /*0040*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0050*/                   HMMA.16816.F32 R12, R4, R8, R12 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR6][R8.64] ;
        /*0080*/               @P0 BRA `(.L_x_2) ;
        /*0090*/               @P2 BRA `(.L_x_4) ;
.L_x_4:
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
        /*00c0*/                   NOP;
        /*00d0*/                   NOP;
"""


def test_what_the_disassembler_prints():
    code = parse_sass(PRINTED)
    assert code.instructions == 12 and code.tensor == 1
    # The branch to itself behind the end, and branches forward, make no loop.
    assert code.loops == (Loop(4, 1, 1, True), Loop(7, 2, 1, False))
    assert code.main_loop == code.loops[0] and parse_sass("").main_loop is None
    assert code.lines == {"": 1, "a.cuh:12": 2, "b.cuh:7": 9}
    assert code.opcodes["LDG"] == 1 and code.opcodes["BRA"] == 4 and "NOP" not in code.opcodes


LOOP = """extern "C" __global__ void k(const float* x, float* y, int n) {
  float sum = 0;
  #pragma unroll 1
  for (int i = 0; i < n; ++i)
    sum += x[32 * i + threadIdx.x];
  y[threadIdx.x] = sum;
}"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_with_one_loop(arch):
    require_nvdisasm()
    code = machine_code(LOOP, arch)
    (loop,) = code.loops
    assert loop.loads == 1 and 4 <= loop.instructions <= 12
    assert code.opcodes["LDG"] == 1 and code.opcodes["STG"] == 1 and code.tensor == 0
    assert code.lines["kernel.cu:5"] >= 2  # the load and the sum
    assert ptx(LOOP).count("ld.global") == 1
