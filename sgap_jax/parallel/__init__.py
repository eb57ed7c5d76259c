"""A matrix in parts: each device of a mesh axis holds some rows, and rows of dense operands travel
where they are needed alone. docs/parallel.md says which problem wants it."""

from sgap_jax.parallel.attention import sparse_attention as sparse_attention
from sgap_jax.parallel.operations import gsddmm as gsddmm
from sgap_jax.parallel.operations import gspmm as gspmm
from sgap_jax.parallel.operations import row_max as row_max
from sgap_jax.parallel.operations import row_sum as row_sum
from sgap_jax.parallel.operations import sddmm as sddmm
from sgap_jax.parallel.operations import sparse_softmax as sparse_softmax
from sgap_jax.parallel.operations import spmm as spmm
from sgap_jax.parallel.partitioned import PartitionedArray as PartitionedArray
from sgap_jax.parallel.spread import from_parts as from_parts
from sgap_jax.parallel.spread import partition as partition
from sgap_jax.parallel.spread import read as read
