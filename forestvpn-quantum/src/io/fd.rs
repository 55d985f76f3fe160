//! File descriptors that come from outside, and the few calls on descriptors that std has no safe form for.
//!
//! `fv` calls [`inherit`] and [`listener`] with the numbers it was given in its environment; `tun` and `link`
//! use the rest. Each function here is safe for any argument.
#![expect(clippy::disallowed_types, reason = "descriptors are taken over one at a time, at start")]
#![expect(
    unsafe_code,
    reason = "taking over a descriptor by number, ioctl, setns and mknod have no safe form"
)]

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Mutex;
use std::time::Duration;

use socket2::{SockRef, Type};

/// Takes over a descriptor that this process was started with, and marks it close-on-exec.
///
/// Only a descriptor without that mark can have been inherited, as it lived through `exec`; whatever this
/// process opens itself has it. So neither a descriptor in use here nor the same one twice can be taken.
///
/// # Errors
/// `EBADF` when nothing is open under this number; `InvalidInput` for standard input, output and error, and
/// for a descriptor that was not inherited.
pub fn inherit(raw: RawFd) -> io::Result<OwnedFd> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    if (0..=2).contains(&raw) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "0, 1 and 2 are standard input and output"));
    }
    // SAFETY: F_GETFD takes no pointer; a number that is not open gives EBADF.
    let flags = unsafe { libc::fcntl(raw, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if flags & libc::FD_CLOEXEC != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not inherited from the parent process"));
    }
    // SAFETY: F_SETFD takes no pointer.
    if unsafe { libc::fcntl(raw, libc::F_SETFD, flags | libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, came through `exec`, and this function hands it out only once, so
    // nothing else in this process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Takes the close-on-exec mark off, so that the next program started from here inherits the descriptor.
/// Gives its number.
///
/// # Errors
/// None known for an open descriptor.
pub fn pass_on(fd: BorrowedFd<'_>) -> io::Result<RawFd> {
    SockRef::from(&fd).set_cloexec(false)?;
    Ok(fd.as_raw_fd())
}

/// A descriptor as a listening UNIX stream socket.
///
/// # Errors
/// `InvalidInput` when it is anything else.
pub fn listener(fd: OwnedFd) -> io::Result<UnixListener> {
    let socket = SockRef::from(&fd);
    let fits = socket.local_addr().is_ok_and(|a| a.is_unix())
        && socket.r#type().is_ok_and(|t| t == Type::STREAM)
        && socket.is_listener().unwrap_or(false);
    if !fits {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a listening UNIX stream socket"));
    }
    Ok(UnixListener::from(fd))
}

/// `struct ifreq`: a name and a value, as most interface calls of the kernel take and give it.
#[repr(C, align(8))]
pub(super) struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    value: [u8; 24],
}

/// The interface calls that are used here.
#[derive(Clone, Copy)]
pub(super) enum IfCall {
    TunAttach,
    TunQuery,
    TunQueue,
    Flags,
    Mtu,
    Index,
}

impl IfReq {
    /// For the interface `name`; cut to the 15 bytes that fit.
    pub(super) fn new(name: &str) -> Self {
        let mut req = Self { name: [0; libc::IFNAMSIZ], value: [0; 24] };
        for (to, from) in req.name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
            *to = from;
        }
        req
    }

    pub(super) fn name(&self) -> String {
        let end = self.name.iter().position(|&b| b == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(self.name.get(..end).unwrap_or_default()).into_owned()
    }

    /// Sets `ifr_flags`, a short.
    pub(super) fn set_flags(&mut self, flags: u16) {
        for (to, from) in self.value.iter_mut().zip(flags.to_ne_bytes()) {
            *to = from;
        }
    }

    /// The value as `ifr_flags`.
    pub(super) fn flags(&self) -> u16 {
        let [a, b, ..] = self.value;
        u16::from_ne_bytes([a, b])
    }

    /// The value as `ifr_mtu` or `ifr_ifindex`.
    pub(super) fn int(&self) -> i32 {
        let [a, b, c, d, ..] = self.value;
        i32::from_ne_bytes([a, b, c, d])
    }

    /// Makes the call on `fd`: a TUN descriptor for the first three, any socket for the others.
    pub(super) fn call(&mut self, fd: BorrowedFd<'_>, call: IfCall) -> io::Result<()> {
        let request = match call {
            IfCall::TunAttach => libc::TUNSETIFF,
            IfCall::TunQuery => libc::TUNGETIFF,
            IfCall::TunQueue => libc::TUNSETQUEUE,
            IfCall::Flags => libc::SIOCGIFFLAGS as _,
            IfCall::Mtu => libc::SIOCGIFMTU as _,
            IfCall::Index => libc::SIOCGIFINDEX as _,
        };
        const { assert!(size_of::<Self>() >= size_of::<libc::ifreq>()) };
        // SAFETY: each of these requests reads and writes at most one `struct ifreq` (the assertion above)
        // at the pointer, which is valid, aligned and ours for the call; any other kind of descriptor gives
        // an error.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(self)) }).map(drop)
    }
}

/// TUNSETOFFLOAD: which super-packets the kernel may hand to us, `TUN_F_` bits.
pub(super) fn tun_set_offload(tun: BorrowedFd<'_>, mask: libc::c_uint) -> io::Result<()> {
    // SAFETY: the argument of this request is a number, not a pointer.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(mask)) }).map(drop)
}

/// TUNSETVNETHDRSZ: bytes of virtio header on each packet.
pub(super) fn tun_set_header_size(tun: BorrowedFd<'_>, bytes: libc::c_int) -> io::Result<()> {
    // SAFETY: this request reads one int at the pointer, which is valid for the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) }).map(drop)
}

/// TUNGETDEVNETNS (Linux 5.2): the network namespace the interface is in now.
pub(super) fn tun_namespace(tun: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: this request takes no argument; on a TUN descriptor it gives a new descriptor or an error.
    let fd = check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNGETDEVNETNS) })?;
    // SAFETY: `fd` was just made by the kernel for us and is owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets a socket option that is an int.
pub(super) fn set_option(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes at the pointer, which are those of `value`; it takes an option of
    // another form for an error.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) }).map(drop)
}

/// Moves the calling thread, and only it, to another network namespace.
pub(super) fn enter_namespace(netns: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers; a descriptor that is not a network namespace gives EINVAL.
    check(unsafe { libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
}

/// Gives the calling thread, and only it, an empty network namespace of its own.
#[cfg(test)]
pub(super) fn leave_namespace() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) }).map(drop)
}

/// Makes a character device node with mode 0600.
pub(super) fn make_node(path: &CStr, major: libc::c_uint, minor: libc::c_uint) -> io::Result<()> {
    let device = libc::makedev(major, minor);
    // SAFETY: `path` is a NUL-terminated string.
    check(unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, device) }).map(drop)
}

/// A non-blocking netlink socket that becomes readable when any interface of the calling thread's network
/// namespace changes.
pub(super) fn link_events() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let fd = check(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) })?;
    // SAFETY: `fd` was just made by the kernel for us and is owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeros is a valid sockaddr_nl.
    let mut addr: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    addr.nl_family = libc::AF_NETLINK as _;
    addr.nl_groups = libc::RTMGRP_LINK as _;
    // SAFETY: the pointer and the length describe `addr`.
    check(unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const addr).cast(),
            size_of::<libc::sockaddr_nl>() as libc::socklen_t,
        )
    })?;
    Ok(fd)
}

/// Waits until `read` is readable, `watch` has an error or hung up (or, if `writable`, can be written to), or
/// the time is over. `WouldBlock` never; a signal ends the wait early.
pub(super) fn wait_either(
    read: Option<BorrowedFd<'_>>,
    watch: BorrowedFd<'_>,
    writable: bool,
    timeout: Duration,
) -> io::Result<()> {
    let events = if writable { libc::POLLOUT } else { 0 };
    let mut set = [
        // A negative descriptor is ignored.
        libc::pollfd { fd: read.map_or(-1, |fd| fd.as_raw_fd()), events: libc::POLLIN, revents: 0 },
        libc::pollfd { fd: watch.as_raw_fd(), events, revents: 0 },
    ];
    poll(&mut set, timeout)
}

/// Waits until `fd` can be written to, at most `timeout`.
pub(super) fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    poll(&mut [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 }], timeout)
}

fn poll(set: &mut [libc::pollfd], timeout: Duration) -> io::Result<()> {
    let millis = libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: pointer and length describe `set`, which is ours for the call.
    match check(unsafe { libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, millis) }) {
        Err(e) if e.kind() != io::ErrorKind::Interrupted => Err(e),
        _ => Ok(()),
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, IntoRawFd};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    #[test]
    fn inherited_descriptor_is_taken_once_and_our_own_never() {
        let own = UnixDatagram::unbound().unwrap();
        assert_eq!(inherit(own.as_raw_fd()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let raw = pass_on(own.as_fd()).unwrap();
        let _ = own.into_raw_fd();
        let taken = inherit(raw).unwrap();
        assert_eq!(taken.as_raw_fd(), raw);
        assert_eq!(inherit(raw).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn standard_streams_and_closed_numbers_are_refused() {
        assert_eq!(inherit(1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(inherit(987_654).unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(inherit(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn only_a_listening_unix_stream_socket_is_a_listener() {
        let dir = std::env::temp_dir().join(format!("fvq-fd-{}", std::process::id()));
        let _ = std::fs::remove_file(&dir);
        let listening = UnixListener::bind(&dir).unwrap();
        std::fs::remove_file(&dir).unwrap();
        assert!(listener(OwnedFd::from(listening)).is_ok());
        let (stream, _other) = UnixStream::pair().unwrap();
        assert!(listener(OwnedFd::from(stream)).is_err());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(listener(OwnedFd::from(tcp)).is_err());
        assert!(listener(OwnedFd::from(std::fs::File::open("/dev/null").unwrap())).is_err());
    }
}
