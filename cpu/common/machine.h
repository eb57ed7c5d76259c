// What the kernels and the choice of schedules know of the machine, read once.
#pragma once

#include <cstdint>

namespace sgap {

struct Machine {
  int64_t l1_bytes, l2_bytes;  // the caches of one core: first-level data, second-level
  int64_t l3_bytes;            // that cores share; 0 where the system does not say
  int64_t cores;
  // Whether it is one of Intel's, whose prefetchers bring the lines after those that are asked for.
  bool intel;
  // Whether its gathering instructions are the fastest way to gather: Intel's with AVX512-FP16, of
  // which microcode slows none (Sapphire Rapids and later, whatever model a host reports).
  bool gathers;
  // Whether it has registers of 64 bytes and takes an instruction on one in one step: not Zen 4,
  // which takes halves, and where a conversion from float16 takes the place of a multiply-add.
  bool whole;

  bool zen5() const { return whole && !intel; }  // or what is like it
};

// With SGAP_CPU_LIKE=intel, zen4 or zen5 the choices are those of that processor; of another name
// the first call throws std::invalid_argument.
const Machine& ThisMachine();

}  // namespace sgap
