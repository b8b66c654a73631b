"""Sandbox a child process that reads files of strangers.

The process has no network, no new privileges, no other processes, and changes no files.  It does
so to itself, for good, by a filter of system calls (seccomp(2)) and by landlock(7), which need no
rights and work in containers and systemd's services.  Where either is missing, `enter` and `close`
say why, and the report shows that.  What it does not prevent: the process reads every file that
its user may read.  A user of its own is the answer to that.

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

MISSING = 3  # exit status: the libraries are not installed

# linux/prctl.h, linux/seccomp.h, linux/bpf_common.h, linux/audit.h, linux/sched.h
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # bytes into struct seccomp_data
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_X32 = 0x40000000  # system calls of another ABI, under other numbers
_CLONE_THREAD = 0x00010000
_MACHINES = {  # asm/unistd.h: the architecture of linux/audit.h, and numbers of system calls
    "x86_64": (
        0xC000003E,
        {"socket": 41, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62}
        | {"chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101}
        | {"utime": 132, "setrlimit": 160, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190}
        | {"removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200}
        | {"utimes": 235, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272}
        | {"utimensat": 280, "prlimit64": 302, "process_vm_readv": 310, "process_vm_writev": 311}
        | {"execveat": 322},
    ),
    "aarch64": (
        0xC00000B7,
        {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15}
        | {"fremovexattr": 16, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55}
        | {"utimensat": 88, "unshare": 97, "ptrace": 117, "kill": 129, "tkill": 130}
        | {"setrlimit": 164, "socket": 198, "clone": 220, "execve": 221, "prlimit64": 261}
        | {"process_vm_readv": 270, "process_vm_writev": 271, "execveat": 281},
    ),
}
_COMMON = {  # the same everywhere
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "clone3": 435,
    "pidfd_getfd": 438,
    "fchmodat2": 452,
    "setxattrat": 463,
}
# Refused from the start, before libraries are imported: network, and other processes.
_AT_FIRST = (
    *("socket", "io_uring_setup", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("pidfd_getfd", "pidfd_send_signal", "kill", "tkill"),
)
# Refused once libraries are imported: new processes, limits, and attributes of files (Landlock lets
# anybody change those).
_AT_LAST = (
    *("fork", "vfork", "clone", "clone3", "execve", "execveat", "unshare"),
    *("setrlimit", "prlimit64"),
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr"),
    *("setxattrat", "removexattr", "lremovexattr", "fremovexattr"),
)
# linux/capability.h: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH are kept
_CAPABILITY_VERSION, _READS = 0x20080522, 1 << 1 | 1 << 2
# linux/landlock.h; these numbers are the same everywhere
_CREATE_RULESET, _RESTRICT_SELF, _VERSION = 444, 446, 1
# All rights of the first version but to execute, to read files and to read directories.
_CHANGES, _TRUNCATE = 0b1_1111_1111_0010, 1 << 14
Instruction = tuple[int, int, int, int]


def enter() -> str:
    """Give up privileges, network and access to other processes, for good; called first.

    Return what could not be given up and why; empty if all was. The rest is given up all the same.
    Root's right to read other users' files stays.
    """
    return "; ".join(filter(None, (_give_up_privileges(), _refuse(_AT_FIRST))))


def close() -> str:
    """Give up new processes, changes to files, and raised limits; return as `enter` does.

    Called when all libraries are imported: some start programs, or search where temporary files can
    be written. Memory and variables of other processes cannot be read in /proc afterwards.
    """
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    return "; ".join(filter(None, (_change_nothing(), _refuse(_AT_LAST))))


def _give_up_privileges() -> str:
    """Drop all capabilities but those to read, for good; return why that failed, or ""."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    capabilities = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 of them
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.capget(header, capabilities):
            capabilities[:] = [capabilities[0] & _READS, capabilities[1] & _READS, 0, 0, 0, 0]
            if not libc.capset(header, capabilities):
                return ""
    except (OSError, AttributeError):
        return "not sandboxed: this system has no capabilities"
    return f"not sandboxed: privileges cannot be given up: {_last_error()}"


def _change_nothing() -> str:
    """Enter a Landlock domain that grants no change of a file system; return why not, or "".

    A process in it may not trace, nor read /proc of, one outside (landlock(7), "Ptrace
    restrictions").
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return "not fully sandboxed: this system has no Landlock"
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    handled = ctypes.c_uint64(_CHANGES | (_TRUNCATE if version >= 3 else 0))
    size = ctypes.c_size_t(8)
    ruleset = call(_CREATE_RULESET, ctypes.byref(handled), size, 0) if version > 0 else -1
    is_in = ruleset >= 0 and call(_RESTRICT_SELF, ruleset, 0) == 0
    why_not = f"it may change files, and see its user's processes: no Landlock: {_last_error()}"
    if ruleset >= 0:
        os.close(ruleset)
    return "" if is_in else f"not fully sandboxed: {why_not}"


def _refuse(names: Iterable[str]) -> str:
    """Have the kernel refuse these system calls from now on; return why it cannot, or "".

    This process and its children cannot undo it, and can gain no rights by set-user-ID programs.
    """
    machine = platform.machine()
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        return f"not sandboxed: no filter of system calls is known for {machine}"
    architecture, numbers = _MACHINES[machine]
    numbers = numbers | _COMMON
    program = _program(architecture, {name: numbers[name] for name in names if name in numbers})
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    program_struct = ctypes.create_string_buffer(pointer)
    calls = (
        (_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.addressof(program_struct), 0, 0),
    )
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
        if any(prctl(*call) for call in calls):
            return f"not sandboxed: the system takes no filter of system calls: {_last_error()}"
    except (OSError, AttributeError):
        return "not sandboxed: this system has no filter of system calls"
    return ""


def _last_error() -> str:
    """Return what the last call through ctypes failed with, as text."""
    return os.strerror(ctypes.get_errno()).lower()


def _program(architecture: int, numbers: dict[str, int]) -> list[Instruction]:
    """Return classic BPF over struct seccomp_data: refuse the named calls, allow all others.

    Calls of another architecture, and of x32, are refused, too. Named ones that are allowed all the
    same: a clone that makes a thread, and a prlimit64 that sets nothing.
    """
    instructions: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    for name, number in numbers.items():
        rule: list[Instruction] = [refuse]
        if name == "clone":  # threads are made by it, too
            rule = [(_LOAD, 0, 0, _ARGUMENTS), (_HAS_BITS, 1, 0, _CLONE_THREAD), refuse, allow]
        elif name == "clone3":  # a filter cannot see its flags; libc goes on with clone
            rule = [(_RETURN, 0, 0, _UNKNOWN)]
        elif name == "prlimit64":  # without a new limit it only reads
            new_limit = _ARGUMENTS + 2 * 8
            low, high = (_LOAD, 0, 0, new_limit), (_LOAD, 0, 0, new_limit + 4)
            rule = [low, (_EQUAL, 0, 2, 0), high, (_EQUAL, 1, 0, 0), refuse, allow]
        instructions += [(_EQUAL, 0, len(rule), number), *rule]
    return [*instructions, allow]
