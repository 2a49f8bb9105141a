"""Command line: parse arguments, run a command, convert errors to messages and exit codes."""

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import mpigossip
from mpigossip.cluster.deadline import prctl
from mpigossip.cluster.launcher import launcher_ranks
from mpigossip.commands.arguments import every, help_text, is_setting
from mpigossip.config.errors import FAILED, OK, WRONG, Failure, UserError, output_error
from mpigossip.config.readable import OF_STDOUT, print_note, printable

COMMANDS = ("train", "files", "graph", "machine", "jobs")
"""Modules of `mpigossip.commands`, in the order of the help."""
TOPICS = {"members": ["join"], "member": ["join"]}
"""Commands to which the name of a topic hints, because it is not a command itself."""
REMEDIES = {
    errno.EACCES: "ask its owner for permission",
    errno.EPERM: "ask its owner for permission",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Remedies for errors of the operating system, by errno."""
READERS = ("resume", "simulate", "data", "log", "report", "checkpoint")
"""Commands that read files that other users may have written, and that may therefore be forged."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL)
"""Signals that end a process after an error in machine code, such as in the HDF5 library."""
HANDED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that a parent process sends on to the child that runs the command."""
PR_SET_PDEATHSIG = 1
SILENT_EXIT_S = 2.0
"""Seconds for which a rank that prints no message waits before it exits after an error.

When a rank exits with an error, launchers end all others, even the rank that has to print the
message.
"""
EXAMPLES = """
mpirun -n 4 mpigossip train digits node.devices=cpu:2
mpigossip simulate digits --nodes 16 run.name=sixteen
mpigossip log plot runs/digits
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user error is printed, and the exit code is 2. A command in `READERS` usually runs in a child
    process (see :func:`_may_crash`), unless ``arguments`` are given, as in tests.

    :param arguments: words of the command line; None: the words of this process
    :raises SystemExit: after help, the version or an error in the arguments was printed
    """
    if arguments is None:
        _able_to_print()
        ended = _in_child(sys.argv[1:]) if _may_crash(sys.argv[1:]) else None
        if ended is not None:
            return ended
    try:
        code = _run(arguments)
    except SystemExit:  # argparse raises this after it has printed help or an error.
        if _unprinted():
            raise SystemExit(FAILED) from None
        raise
    if _unprinted():
        code = code or FAILED
    if process := sys.modules.get("mpigossip.cluster.process"):
        process.exit_handler.status = code
        process.exit_after_failure(code)
    return code


def _able_to_print() -> None:
    """Make sure that printing works on all standard streams.

    Closed streams are opened on /dev/null, and characters that a terminal lacks are escaped.
    """
    # Otherwise, a file that is opened later would get the descriptor of a closed stream.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            # This fails if the stream is a file whose position is no longer known.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def _may_crash(words: Sequence[str]) -> bool:
    """Return whether to run the command in a child process, because a file could crash it.

    The result is always False in a rank that a launcher has started, and on macOS.
    """
    waits = hasattr(signal, "sigwaitinfo")  # macOS does not have this function.
    return waits and any(word in READERS for word in words[:1]) and not launcher_ranks(os.environ)


def _in_child(words: Sequence[str]) -> int | None:
    """Fork a child process for the command, and wait for it in the parent.

    The function returns None in the child process, where the caller then runs the command. Some
    damaged or forged files crash the HDF5 library, even if they pass all checks that are possible
    before HDF5 reads them. The crash then ends the child only, and the parent prints a message.

    :param words: words of the command line
    :return: None in the child process; in the parent, the exit code of the child, or FAILED after a
        crash. If another signal has ended the child, it ends the parent, too
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGCHLD})
    pid = os.fork()
    if not pid:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    while (got := signal.sigwaitinfo({*HANDED_ON, signal.SIGCHLD})).si_signo in HANDED_ON or (
        not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    ):
        # A signal from the terminal reaches both processes. Forward only signals of other senders.
        if got.si_signo in HANDED_ON and got.si_code <= 0:
            os.kill(pid, got.si_signo)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if -code in CRASHES:
        what = " ".join(words[:3])
        print_note(
            f"`{what}` crashed ({signal.Signals(-code).name}), as the HDF5 library does on some "
            "damaged or forged files; use another copy of the file that it reads"
        )
        return FAILED
    if -code == signal.SIGKILL:  # The child could not handle this signal and print a message.
        fix = ": use fewer nodes" if words[0] in ("resume", "simulate") else ""
        print_note(f"killed by the system, probably because memory ran out{fix}")
        signal.raise_signal(-code)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    """Run one command; print its expected errors, and return the exit code.

    :param arguments: words of the command line; None: the words of this process
    """
    options = _parse(arguments)
    try:
        return options.run(options) or OK
    except BrokenPipeError:
        sys.stderr.close()
        return OK
    except UserError as error:
        if _prints_error(error):
            print_note(error)
        else:
            if short := getattr(error, "short", ""):
                print_note(short)
            time.sleep(SILENT_EXIT_S)
        return WRONG
    except Failure as error:
        print_note(error)
        return error.code
    except OSError as error:
        if error.filename and error.errno in REMEDIES:
            name = os.fsdecode(error.filename)[-200:]
            print_note(f"{name}: {error.strerror}; {REMEDIES[error.errno]}")
            return WRONG
        blamed = hasattr(error, OF_STDOUT) or _is_unbuffered()
        if not _unprinted(error if blamed else None):
            raise
        return FAILED
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        print_note(f"not enough memory{why}: use fewer nodes, samples, classes or parameters")
        return WRONG
    except KeyboardInterrupt:
        print_note("interrupted")
        return 130


def _is_unbuffered() -> bool:
    """Return whether standard output is unbuffered, so that it reports an error only once.

    A buffered stream keeps a text that it could not write, and fails again at the next flush. If an
    error does not occur again, another file has therefore caused it. A text that is larger than the
    buffer is an exception, because the stream does not keep it: `print_safe` marks such errors.
    """
    return isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase)


def _unprinted(error: OSError | None = None) -> bool:
    """Return whether standard output can't be written; if so, print why on standard error.

    :param error: error of the command; None: flush standard output to find out
    """
    why = output_error(error)
    if why:
        print_note(f"standard output can't be written: {why}")
    return bool(why)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; if there are none, print the help and exit.

    The job and the settings, which are optional, may come after options.
    """
    top = parser()
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _check_command(top, words)
    options, remaining = top.parse_known_args(words)
    settings = getattr(options, "settings", None)
    word = remaining[0] if remaining else "-"
    may_be_job = not word.startswith("-") and not is_setting(word)
    if may_be_job and getattr(options, "job", "") is None:
        options.job = Path(remaining.pop(0))
    if remaining and (
        settings is None or any("=" not in word or word[0] == "-" for word in remaining)
    ):
        top.error(f"unrecognized arguments: {' '.join(remaining)}")
    if settings is not None:
        options.settings = [*settings, *remaining]
    return options


def _check_command(top: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Exit with a hint if the first word is neither an option nor a command.

    An example is `mpigossip plot`, because the command is `mpigossip log plot`.

    :param top: parser of all commands
    :param arguments: words of the command line
    """
    from mpigossip.config.toml import near

    commands = [words for words, _ in every(top) if words]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        matches = TOPICS.get(arguments[0]) or [
            words for words in commands if words.endswith(f" {arguments[0]}")
        ]
        hint = " or ".join(f"`mpigossip {words}`" for words in matches)
        hint = (
            f"did you mean {hint}?"
            if matches
            else near(arguments[0], [w for w in commands if " " not in w])
        )
        top.error(f'"{arguments[0]}" is not a command; {hint}')


def _prints_error(error: UserError) -> bool:
    """Return whether this process has to print an error; rank 0 prints collective errors."""
    if error.rank is not None:
        return error.rank == 0
    from mpigossip.cluster import process

    return process.prints_shared_messages()


class Parser(argparse.ArgumentParser):
    """A parser whose messages are printable on any terminal."""

    def error(self, message: str) -> NoReturn:
        """Print a message about arguments that can't be parsed, and exit."""
        super().error(printable(message))


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = Parser(
        prog="mpigossip",
        **help_text("Train PyTorch models across nodes by averaging with neighbours.", EXAMPLES),
    )
    top.add_argument("--version", action="version", version=mpigossip.__version__)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"mpigossip.commands.{name}").add(commands)
    return top
