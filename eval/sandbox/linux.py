"""Restrict a process by system calls of Linux: namespaces, Landlock, seccomp.

Each function restricts the calling process for good, or raises OSError if this kernel or container lacks the means.
Sources: the kernel's documentation (userspace-api/landlock, userspace-api/seccomp_filter) and the man pages of
unshare(2), mount_setattr(2), prctl(2), capset(2). The guard imports this module as a top-level module, without the
package.
"""

import ctypes
import errno
import os
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

# include/uapi/linux/{prctl,sched,mount}.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2
# Numbers of the newer system calls, the same on every architecture.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_LANDLOCK_MINIMUM = 3  # Linux 6.2: earlier versions let a process truncate any file of its user


def _call(function: str, *arguments) -> int:
    """Call a function of the C library. Raise OSError if it fails."""
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
    """Let the kernel kill this process when its parent ends, however that ends.

    Args:
        parent: The parent's process id; 0 if the parent is outside of this process namespace.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def hide_memory() -> None:
    """Close /proc/PID/{mem,environ,fd} of this process to processes of the same user, and prevent core dumps."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show_counts() -> None:
    """Undo `hide_memory`, so that processes of the same user can read /proc/PID/io."""
    _prctl(_PR_SET_DUMPABLE, 1)


def drop_privileges() -> None:
    """Give up all capabilities for good: executing a file gives none back."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _call("capset", header, bytes(24))


def namespaces(folder: str, readable: list[str], size: int, files: int) -> None:
    """Move to new user, process, network, IPC and mount namespaces: no network, no other process, few files.

    The root becomes a file system that holds `readable`, read-only, and `folder`, which lies in memory and disappears
    with the last process. The process namespace starts with the next child, which is its process 1. When that one ends,
    all processes in it end.

    Args:
        folder: The folder for files of the program. It is empty.
        readable: Paths of files and folders; those that do not exist are skipped.
        size: How many bytes the folder holds.
        files: How many files the folder holds.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWNS)
    for name, content in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    _mount("/", _MS_REC | _MS_PRIVATE)
    _mount(folder, _MS_NOSUID | _MS_NODEV, "tmpfs", "mode=755")
    # Real paths first, then the links to them. Sorted, so that a folder comes before the files in it.
    for real in sorted({os.path.realpath(path) for path in readable}):
        if os.path.exists(real) and not os.path.lexists(folder + real):
            _bind(real, folder + real)
    for path in readable:
        if os.path.exists(path) and not os.path.lexists(folder + path):
            parent = os.path.dirname(path)
            os.makedirs(folder + parent, exist_ok=True)
            os.symlink(os.path.relpath(os.path.realpath(path), parent), folder + path)
    # The program's folder keeps its path under the new root.
    os.makedirs(folder + folder, exist_ok=True)
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    _syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(folder), _AT_RECURSIVE, read_only, len(read_only))
    _mount(folder + folder, _MS_NOSUID | _MS_NODEV, "tmpfs", f"size={size},nr_inodes={files},mode=700")
    # Not pivot_root, which a machine that runs from its initial RAM disk refuses. Only two ways lead out of this root:
    # a descriptor of a folder outside, but none is open, and CAP_SYS_CHROOT, which `drop_privileges` gives up.
    os.chroot(folder)
    os.chdir("/")


def _mount(path: str, flags: int, kind: str = "none", options: str = "", source: str = "none") -> None:
    names = (os.fsencode(name) for name in (source, path, kind))
    _call("mount", *names, ctypes.c_ulong(flags), os.fsencode(options))


def _bind(source: str, place: str) -> None:
    """Show the file or folder `source` at `place` too, where nothing exists yet."""
    if os.path.isdir(source):
        os.makedirs(place)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
    _mount(place, _MS_BIND | _MS_REC, source=source)


def landlock_version() -> int:
    """Return the version of Landlock that this kernel offers, or 0 if it offers none."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def landlock(folder: str, readable: list[str]) -> None:
    """Allow this process to read files under `readable` and `folder`, and to create and write files in `folder`.

    The process cannot execute files or make folders. From version 4 of Landlock on, it has no TCP. From version 6 on,
    it cannot use abstract Unix sockets or signal processes outside of its domain. Each call creates a domain inside the
    one before. A child that calls this once more can therefore neither signal nor trace its parent.

    Args:
        folder: The folder for files of the program.
        readable: Paths of files and folders; those that do not exist are skipped.

    Raises:
        OSError: The kernel has no Landlock, or a version before 3 (Linux 6.2).
    """
    version = landlock_version()
    if version < _LANDLOCK_MINIMUM:
        raise OSError(errno.ENOSYS, f"Landlock must have version {_LANDLOCK_MINIMUM} (Linux 6.2), not {version}")
    write_file, read_file, read_dir, remove_file, make_file, truncate = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
    # Refuse all rights of the file system that this version knows; version 5 adds ioctl on devices, as bit 15.
    rights = (1 << 15) - 1 | (version >= 5) << 15
    network, scope = 0b11 * (version >= 4), 0b11 * (version >= 6)  # TCP; abstract sockets and signals
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
                continue  # a path that does not exist needs no permission
            try:
                access &= rights if os.path.isdir(path) else rights & ~(read_dir | remove_file | make_file)
                _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, descriptor), 0)
            finally:
                os.close(descriptor)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


# System calls that no solution needs -> their numbers on x86_64 and aarch64, `None` if an architecture lacks one
# (include/uapi/asm).
_DENIED = {
    # processes and threads, programs, signals, scheduling
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "setsid": (112, 157), "setpgid": (109, 154), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "setrlimit": (160, 164), "prlimit64": (302, 261),
    # settings of this process: die_with_parent, hide_memory, this filter
    "prctl": (157, 167), "seccomp": (317, 277),
    # the memory of other processes, and kernel memory that the limits do not count
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "io_setup": (206, 0),
    "shmget": (29, 194), "shmctl": (31, 195), "shmat": (30, 196), "semget": (64, 190), "semctl": (66, 191),
    "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgctl": (71, 187), "msgrcv": (70, 188),
    "msgsnd": (69, 189), "mq_open": (240, 180), "mq_unlink": (241, 181), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # the network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # ways to write that the kernel's counter does not count (`_watch`), and descriptors in sockets
    "fallocate": (285, 47), "splice": (275, 76), "vmsplice": (278, 75), "tee": (276, 77), "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # the file system beyond plain files
    "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fspick": (433, 433), "mount_setattr": (442, 442),
    # interfaces that expose large parts of the kernel
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "syslog": (103, 116),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "personality": (135, 92), "modify_ldt": (154, None),
}  # fmt: skip
_CLONE3 = 435  # refused as "not implemented", after which the C library tries clone

# System calls that are allowed with certain arguments only -> (x86_64, aarch64, alternatives). In one of the
# alternatives each test (argument, mask, values) must hold: `argument & mask` is one of the values.
_ALL = 0xFFFFFFFF
_PARTLY = {
    # duplicates, locks, and flags without O_ASYNC; so no signals to the owner of the other end, and no leases
    "fcntl": (72, 25, [[(1, _ALL, [0, 1, 2, 3, 5, 6, 7, 1030])], [(1, _ALL, [4]), (2, 0x2000, [0])]]),
    # TCGETS (is this a terminal?), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (16, 29, [[(1, _ALL, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])]]),
    # anonymous or private mappings only, because no counter sees writes to a shared mapping of a file
    "mmap": (9, 222, [[(3, 0x20, [0x20])], [(3, 0xF, [2])]]),
    # AF_UNIX with SOCK_STREAM, as asyncio needs. From a datagram socket, a process can send to any path.
    "socketpair": (53, 199, [[(0, _ALL, [1]), (1, 0xF, [1])]]),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
# Classic BPF: (operation, jump if true, jump if false, operand) on the data {nr, arch, instruction pointer, arguments}.
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _KILL = (_RETURN, 0, 0, 0x7FFF0000), (_RETURN, 0, 0, 0x80000000)
_REFUSE = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_NOT_IMPLEMENTED = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)


def seccomp() -> None:
    """Refuse the system calls of `_DENIED`, and calls of `_PARTLY` with other arguments than allowed, by EPERM.

    A call by the numbers of another architecture kills the process.

    Raises:
        OSError: There is no table for this architecture, or the kernel has no seccomp.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, audit_arch = _ARCHITECTURES[machine]
    denied = [row[column] for row in _DENIED.values() if row[column] is not None]
    # Offset 4 of the data holds the architecture, offset 0 the number of the call.
    program = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit_arch), _KILL,
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), _KILL,  # x32: a second numbering on x86-64
        (_EQUAL, 0, 1, _CLONE3), _NOT_IMPLEMENTED,
    ]  # fmt: skip
    for row in _PARTLY.values():
        check = [instruction for tests in row[2] for instruction in _alternative(tests)] + [_REFUSE]
        program += [(_EQUAL, 0, len(check), row[column]), *check]
    # A denied number jumps to the last instruction.
    program += [(_EQUAL, len(denied) - i, 0, number) for i, number in enumerate(denied)] + [_ALLOW, _REFUSE]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))


def _alternative(tests: list[tuple[int, int, list[int]]]) -> list[tuple[int, int, int, int]]:
    """Return instructions that allow the call if all tests hold, and otherwise continue after them."""
    code = [_ALLOW]
    for argument, mask, values in reversed(tests):
        otherwise = (_JUMP, 0, 0, len(code))
        compare = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        # Load the lower half of the argument. The kernel ignores the upper half for these calls.
        code = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask), *compare, otherwise, *code]
    return code
