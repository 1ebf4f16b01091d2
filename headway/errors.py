"""The base of every error that Headway raises on purpose."""


class HeadwayError(Exception):
    """A refusal that a person can act on: what is wrong, and what to do about it.

    Subclass it per cause. `message` names the offending value and the limit; `remedy` is the next step. The command
    line prints both and exits 2, without a stack trace.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message
