"""What the pictures compute."""

from benchmarks.plots import crossings, middle_half


def test_curves_cross_between_values_that_differ():
    assert crossings([1, 1, 2], [2, 2, 1]) == [1 + 1 / 3]  # -0.5 and then 1
    assert crossings([1.0, 3.0], [2.0, 2.0]) == [0.5]
    assert crossings([1, 1.0, 3], [2, 1.01, 2]) == [1.0]  # what is nearly equal is passed over
    assert crossings([1, 1, 1], [1.01, 0.99, 1.01]) == []  # noise
    assert crossings([2, 2, 2], [1, 1, 1]) == []


def test_the_middle_half_has_half_of_the_numbers():
    assert middle_half([1.0, 2, 3, 4, 5]) == (2, 4)
    assert middle_half([7.0]) == (7, 7)
