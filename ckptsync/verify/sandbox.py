"""Keep a process that looks at files of strangers away from everything else: no network, no new privileges, no other processes, no changes to files.

The process does so to itself, for good, by a filter of system calls (seccomp(2)) and by landlock(7), which need no rights and work in containers and in
systemd's services.  Where either cannot be had, `enter` and `close` say why; whoever shows the result shows that, too.

What it does not prevent: the process is its user's, so it reads every file that this user may read.  A user of its own is the answer to that.

Imports the standard library only: the interpreter that has torch may have little else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable

# linux/prctl.h, linux/seccomp.h, linux/bpf_common.h, linux/audit.h, linux/sched.h
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # bytes into struct seccomp_data
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_X32 = 0x40000000  # system calls of another ABI, under other numbers
_CLONE_THREAD = 0x00010000
_KNOWN = {  # asm/unistd.h
    "x86_64": (
        0xC000003E,
        {
            "socket": 41,
            "clone": 56,
            "fork": 57,
            "vfork": 58,
            "execve": 59,
            "kill": 62,
            "ptrace": 101,
            "setrlimit": 160,
            "tkill": 200,
        }
        | {"prlimit64": 302, "process_vm_readv": 310, "process_vm_writev": 311, "execveat": 322}
        | {"chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "fchmodat": 268}
        | {"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199}
        | {"utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "unshare": 272},
    ),
    "aarch64": (
        0xC00000B7,
        {"socket": 198, "clone": 220, "execve": 221, "kill": 129, "ptrace": 117, "setrlimit": 164, "tkill": 130}
        | {"prlimit64": 261, "process_vm_readv": 270, "process_vm_writev": 271, "execveat": 281}
        | {"fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "unshare": 97}
        | {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16},
    ),
}
# linux/capability.h: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH are kept
_CAPABILITY_VERSION, _READS = 0x20080522, 1 << 1 | 1 << 2
# linux/landlock.h; these numbers are the same everywhere
_CREATE_RULESET, _RESTRICT_SELF, _VERSION = 444, 446, 1
_CHANGES, _TRUNCATE = 0b1_1111_1111_0010, 1 << 14  # all rights of the first version but to execute, read files and read directories
_COMMON = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "clone3": 435,
    "pidfd_getfd": 438,
    "fchmodat2": 452,
    "setxattrat": 463,
}  # the same everywhere
_NETWORK = ("socket", "io_uring_setup")
_OTHERS = ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "pidfd_send_signal", "kill", "tkill")
_PROCESSES = ("fork", "vfork", "clone", "clone3", "execve", "execveat")
_LIMITS = ("setrlimit", "prlimit64")
_ATTRIBUTES = (  # of files: Landlock lets anybody change them
    *(
        "chmod",
        "fchmod",
        "fchmodat",
        "fchmodat2",
        "chown",
        "fchown",
        "lchown",
        "fchownat",
        "utime",
        "utimes",
        "futimesat",
        "utimensat",
    ),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr"),
)

Instruction = tuple[int, int, int, int]


def enter() -> str:
    """To be called first: no sockets, no new privileges, no way into other processes.  What could not be had, and why, or nothing.

    Of root's own privileges it keeps those to read what is another user's.
    """
    return _give_up_privileges() or _refuse((*_NETWORK, *_OTHERS))


def close() -> str:
    """To be called when all libraries are imported: no further process or program, no file is written or removed, no limit is raised.

    Nor can memory and variables of other processes be read in /proc.  Answers as `enter` does.  Imports come before: some libraries start programs, or
    look where temporary files can be written, when they are imported.
    """
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(what, (0, 0))
    return _change_nothing() or _refuse((*_PROCESSES, "unshare", *_LIMITS, *_ATTRIBUTES))


def _give_up_privileges() -> str:
    """For good: what is not permitted any more cannot be had back."""
    header, held = (
        (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0),
        (ctypes.c_uint32 * 6)(),
    )  # effective, permitted, inheritable; twice 32 of them
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.capget(header, held):
            held[:] = [held[0] & _READS, held[1] & _READS, 0, 0, 0, 0]
            if not libc.capset(header, held):
                return ""
    except (OSError, AttributeError):
        return "not sandboxed: this system has no capabilities"
    return f"not sandboxed: privileges cannot be given up: {os.strerror(ctypes.get_errno()).lower()}"


def _change_nothing() -> str:
    """A domain in which every right to change a file system is handled, and given for no path: nothing else is refused.

    Who is in it may not trace, nor read /proc of, a process that is not (landlock(7), "Ptrace restrictions").
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return "not fully sandboxed: this system has no Landlock"
    known = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    handled = ctypes.c_uint64(_CHANGES | (_TRUNCATE if known >= 3 else 0))
    ruleset = call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0) if known > 0 else -1
    is_in = ruleset >= 0 and call(_RESTRICT_SELF, ruleset, 0) == 0
    reason = "" if is_in else os.strerror(ctypes.get_errno()).lower()
    if ruleset >= 0:
        os.close(ruleset)
    return reason and f"not fully sandboxed: it may change files, and see its user's processes: no Landlock: {reason}"


def _refuse(names: Iterable[str]) -> str:
    machine = platform.machine()
    if machine not in _KNOWN or struct.calcsize("P") != 8:
        return f"not sandboxed: no filter of system calls is known for {machine}"
    architecture, numbers = _KNOWN[machine]
    numbers = numbers | _COMMON
    program = _program(architecture, {name: numbers[name] for name in names if name in numbers})
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    kept = ctypes.create_string_buffer(code, len(code))
    given = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(kept)))
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
        for call in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.addressof(given), 0, 0)):
            if prctl(*call):
                return f"not sandboxed: the system takes no filter of system calls: {os.strerror(ctypes.get_errno()).lower()}"
    except (OSError, AttributeError):
        return "not sandboxed: this system has no filter of system calls"
    return ""


def _program(architecture: int, numbers: dict[str, int]) -> list[Instruction]:
    """Classic BPF over struct seccomp_data: what is named is refused, all else is allowed."""
    made: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for name, number in numbers.items():
        rule = _rule(name)
        made += [(_EQUAL, 0, len(rule), number), *rule]
    return [*made, (_RETURN, 0, 0, _ALLOW)]


def _rule(name: str) -> list[Instruction]:
    """What is done with a call: some are refused only where they do more than any process needs."""
    if name == "clone":  # threads are made by it, too
        return [(_LOAD, 0, 0, _ARGUMENTS), (_HAS_BITS, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    if name == "clone3":  # its flags are out of a filter's sight; libc goes on with clone
        return [(_RETURN, 0, 0, _UNKNOWN)]
    if name == "prlimit64":  # without a new limit it only reads
        new = _ARGUMENTS + 2 * 8
        is_none = [(_LOAD, 0, 0, new), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, new + 4), (_EQUAL, 1, 0, 0)]
        return [*is_none, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return [(_RETURN, 0, 0, _REFUSE)]
