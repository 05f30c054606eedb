"""What Linux offers against a hostile process, by system calls through ctypes: namespaces, Landlock, seccomp.

Each function restricts the calling process for good, or raises OSError where this kernel or container lacks it.
Sources: the kernel's documentation (userspace-api/landlock, userspace-api/seccomp_filter) and the man pages of
unshare(2), mount_setattr(2), prctl(2), capset(2).
This module stands alone: the child process loads it by itself, without the package.
"""

import ctypes
import errno
import os
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

# include/uapi/linux/{prctl,sched,mount}.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
# Numbers of the newer system calls, the same on every architecture.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446


def _call(function: str, *arguments) -> int:
    """A function of the C library; OSError where it fails."""
    result = getattr(_libc, function)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments) -> int:
    return _call("syscall", *(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)))


def _prctl(option: int, *arguments) -> None:
    _call("prctl", option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*arguments, 0, 0, 0, 0)[:4]))


def die_with_parent(parent: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that it can be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Close /proc/PID/{mem,environ,fd} of this process to processes of the same user; no core dumps."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_privileges() -> None:
    """No capabilities, and none to be gained by executing a file."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _call("capset", header, bytes(24))


def namespaces(folder: str, size: int, files: int) -> None:
    """Own user, process, network, IPC and mount namespaces: no network, no other process, a read-only file system.

    `folder` becomes a file system in memory with room for `size` bytes in `files` files; it goes with the last process.
    The process namespace starts with the next child, which is its process 1: when it ends, all in it end.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWNS)
    for name, content in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    nothing = ctypes.c_void_p()
    _call("mount", b"none", b"/", nothing, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), nothing)
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    _syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only))
    options = f"size={size},nr_inodes={files},mode=700".encode()
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options)


def landlock_version() -> int:
    """The version of Landlock that this kernel offers, 0 where it offers none."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def landlock(folder: str, readable: list[str]) -> None:
    """Read files only under `readable` and `folder`, create and write them only in `folder`; execute none, no folders.

    Version 4 and later: no TCP; version 6 and later: no signals to processes outside, no abstract Unix sockets.
    """
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    write_file, read_file, read_dir, remove_file, make_file, truncate = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
    rights = (1 << 13) - 1  # version 1; later ones add: refer, truncate, ioctl on devices
    rights |= (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    network, scope = 0b11 * (version >= 4), 0b11 * (version >= 6)
    ruleset_bytes = struct.pack("QQQ", rights, network, scope)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _syscall(_LANDLOCK_CREATE, ruleset_bytes, len(ruleset_bytes), 0)
    try:
        allowed = {path: read_file | read_dir for path in readable}
        allowed["/dev/null"] = read_file | write_file
        allowed[folder] = read_file | read_dir | write_file | remove_file | make_file | truncate
        for path, access in allowed.items():
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # what is not there needs no permission
            try:
                access &= rights if os.path.isdir(path) else rights & ~(read_dir | remove_file | make_file)
                _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, descriptor), 0)
            finally:
                os.close(descriptor)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


# System calls that no solution needs: (x86_64, aarch64), None where an architecture lacks it (include/uapi/asm).
_DENIED = {
    # processes and threads, programs, signals
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "setsid": (112, 157), "setpgid": (109, 154), "setpriority": (141, 140), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "setrlimit": (160, 164), "prlimit64": (302, 261),
    # the memory of others, kernel memory that limits do not count
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # the network
    "socket": (41, 198), "connect": (42, 203),
    # the file system beyond plain files
    "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "open_by_handle_at": (304, 265), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    # the kernel's large doors
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "personality": (135, 92), "modify_ldt": (154, None),
}  # fmt: skip
_CLONE3 = 435  # answered "not implemented": the C library then tries clone
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*


def seccomp() -> None:
    """Refuse the system calls of `_DENIED` (EPERM); a call in another architecture's numbering kills the process."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, audit_arch = _ARCHITECTURES[machine]
    numbers = sorted(row[column] for row in _DENIED.values() if row[column] is not None)
    # Classic BPF: (operation, jump if true, jump if false, operand); the data is {nr, arch, ...}.
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000, 0x80000000
    n = len(numbers)
    program = [
        (load, 0, 0, 4), (equal, 0, n + 6, audit_arch), (load, 0, 0, 0), (at_least, n + 4, 0, 0x40000000),
        (equal, n + 2, 0, _CLONE3),
        *((equal, n - i, 0, number) for i, number in enumerate(numbers)),
        (give, 0, 0, allow), (give, 0, 0, refuse | errno.EPERM), (give, 0, 0, refuse | errno.ENOSYS),
        (give, 0, 0, kill),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
