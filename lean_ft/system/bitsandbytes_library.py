"""Whether bitsandbytes can be used. It imports without its compiled library, and fails at the first kernel then."""

import logging


def why_unusable(*, on_gpu: bool) -> str | None:
    """Says why bitsandbytes cannot be used here, `on_gpu` or on a CPU, whose operations need no compiled library; None
    where it can."""
    # It warns of a kernel that it would download for inference on a CPU, which is not used here.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from bitsandbytes.cextension import lib
    except (ImportError, OSError, RuntimeError) as error:
        return f"it cannot be imported: {error}"
    finally:
        logger.setLevel(level)
    if on_gpu and not lib.compiled_with_cuda:
        failed = vars(lib).get("error_msg")  # the library that stands in where loading failed notes why
        return "it has no library compiled for this GPU" + (f": {failed}" if failed else "")
    return None
