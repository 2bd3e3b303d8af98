"""The one error of the data code."""


class DataError(ValueError):
    """A dataset that cannot be used as it is: the message names the file or field, what was found, and the fix."""
