"""Expression x format x schedule -> loops -> machine code (Senanayake et al., OOPSLA 2020)."""
