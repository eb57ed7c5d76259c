from sgap_jax.schedules.atomic import AtomicParallelism as AtomicParallelism
from sgap_jax.schedules.cpu import CpuTile as CpuTile
from sgap_jax.schedules.problem import Problem as Problem
from sgap_jax.schedules.schedule import Reference as Reference
from sgap_jax.schedules.schedule import Schedule as Schedule
from sgap_jax.schedules.schedule import ScheduleError as ScheduleError
from sgap_jax.schedules.select import choose_schedule as choose_schedule
from sgap_jax.schedules.space import legal_points as legal_points
