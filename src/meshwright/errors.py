"""The errors meshwright raises for a person to read.

Every message is one sentence: the value seen, the rule it breaks, the legal values.
The command line prints the message alone and exits with the class's ``exit_code``.
"""


class MeshwrightError(Exception):
    """Base of every error meant for a person. ``exit_code`` 1: the work failed; 2: the input is wrong."""

    exit_code = 1


class InputError(MeshwrightError):
    """The job, a file or an argument is wrong; raised before any rank starts where possible."""

    exit_code = 2


class DataError(InputError):
    """A data file is missing, empty, cut short or malformed; the message names the file and the position."""


class CheckpointError(InputError):
    """A checkpoint is missing, unreadable, of another format, or belongs to another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete or its bytes are not those that were written; the message names the file."""

    exit_code = 1


class SaveError(MeshwrightError):
    """A checkpoint could not be written; earlier ones stand as they were."""


class TrainingStopped(MeshwrightError):
    """Training ended early by an agreed decision (NaN policy, signal); what was saved stays saved."""


def first_line(error: BaseException) -> str:
    """What an error says in its first line, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
