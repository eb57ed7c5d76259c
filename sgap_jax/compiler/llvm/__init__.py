"""The loop IR as LLVM IR for this CPU, and as machine code with a name for XLA."""
