"""Answers with a pickle that would run a command where it is loaded.
Defence: nothing from a candidate is ever unpickled; this is no reply.
"""

BACKEND = "torch"


class Answer:
    def __reduce__(self):
        return print, ("a pickle was loaded",)


def kernel_fn(x, weight):
    __import__("os").write(4, __import__("pickle").dumps(Answer()).ljust(64))
    return Answer()
