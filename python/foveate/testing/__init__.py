"""Checks of Foveate beside other people's tests: :mod:`foveate.testing.upstream`."""
