"""A matrix in parts: each device of a mesh axis holds some rows, and rows of dense operands travel
where they are needed alone. docs/parallel.md says which problem wants it."""

from sgap_jax.parallel.partitioned import PartitionedArray as PartitionedArray
from sgap_jax.parallel.partitioned import partition as partition
from sgap_jax.parallel.partitioned import spmm as spmm
