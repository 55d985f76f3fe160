//! Opening the pair of UDP sockets that a tunnel listens on, with the options it needs. For `udp`.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use socket2::{Domain, Protocol, Socket, Type};

use super::fd::set_option;
use super::offloads::{Kernel, Offloads};

/// Tries to find a port that is free for both families, when the port does not matter (`protocol.md` 3.3).
const PORT_TRIES: usize = 100;
/// Bytes that may wait in the kernel to be read. A sender's burst of trains comes at line rate and must fit.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Bytes that may wait in the kernel to be sent; more would only be delay.
const SEND_BUFFER: usize = 1 << 20;

/// Bytes that the kernel granted to each socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketBuffers {
    /// Waiting to be read.
    pub receive: usize,
    /// Waiting to be sent.
    pub send: usize,
}

impl SocketBuffers {
    /// What is asked for.
    pub const WANTED: Self = Self { receive: RECEIVE_BUFFER, send: SEND_BUFFER };
}

/// Two sockets on one port; one of them may be absent.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) v4: Option<Socket>,
    pub(super) v6: Option<Socket>,
    pub(super) port: u16,
    fwmark: AtomicU32,
    /// No other pair of this process has it.
    pub(super) serial: u64,
    pub(super) buffers: SocketBuffers,
    /// Most datagrams of one send; 1 = a train is not to be handed over whole.
    pub(super) segments: usize,
    /// Several datagrams may be handed over as one.
    pub(super) gro: bool,
}

impl Pair {
    pub(super) fn open(port: u16, fwmark: u32, offloads: Offloads) -> io::Result<Self> {
        let mut tries = if port == 0 { PORT_TRIES } else { 1 };
        loop {
            tries -= 1;
            match Self::open_once(port, fwmark, offloads) {
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && tries > 0 => {}
                other => return other,
            }
        }
    }

    fn open_once(port: u16, fwmark: u32, offloads: Offloads) -> io::Result<Self> {
        let v4 = socket(Domain::IPV4, (Ipv4Addr::UNSPECIFIED, port).into(), fwmark)?;
        let port = match &v4 {
            Some(socket) => local_port(socket)?,
            None => port,
        };
        let v6 = socket(Domain::IPV6, (Ipv6Addr::UNSPECIFIED, port).into(), fwmark)?;
        let Some(any) = v4.as_ref().or(v6.as_ref()) else {
            return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT));
        };
        let port = local_port(any)?;
        // The kernel doubles what is asked for, for its own overhead.
        let buffers =
            SocketBuffers { receive: any.recv_buffer_size()? / 2, send: any.send_buffer_size()? / 2 };
        let kernel = Kernel::running();
        let both = |probe: fn(&Socket) -> bool| [&v4, &v6].into_iter().flatten().all(probe);
        let segments = if offloads.udp_gso && both(can_segment) { kernel.gso_segments() } else { 1 };
        let gro = offloads.udp_gro && kernel.gro() && both(join_received);
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        Ok(Self { v4, v6, port, fwmark: fwmark.into(), serial, buffers, segments, gro })
    }

    /// Changes the mark of both sockets, or of none.
    //@ C-OUT-8
    pub(super) fn set_fwmark(&self, fwmark: u32) -> io::Result<()> {
        let before = self.fwmark.load(Ordering::Relaxed);
        if fwmark == before {
            return Ok(());
        }
        let mut done: Vec<&Socket> = Vec::new();
        for socket in [&self.v4, &self.v6].into_iter().flatten() {
            if let Err(error) = socket.set_mark(fwmark) {
                for socket in done {
                    let _ = socket.set_mark(before);
                }
                return Err(error);
            }
            done.push(socket);
        }
        self.fwmark.store(fwmark, Ordering::Relaxed);
        Ok(())
    }

    /// The socket that can send to `to`.
    pub(super) fn towards(&self, to: &SocketAddr) -> Option<BorrowedFd<'_>> {
        if to.is_ipv4() { self.v4.as_ref() } else { self.v6.as_ref() }.map(AsFd::as_fd)
    }
}

/// Tries UDP_SEGMENT and takes it back: left on the socket it would cut every later datagram.
fn can_segment(socket: &Socket) -> bool {
    let fd = socket.as_fd();
    set_option(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 1500).is_ok()
        && set_option(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
}

fn join_received(socket: &Socket) -> bool {
    set_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1).is_ok()
}

fn local_port(socket: &Socket) -> io::Result<u16> {
    Ok(socket.local_addr()?.as_socket().map_or(0, |a| a.port()))
}

/// `None`: the machine does not have this family (IPv6 switched off, say).
///
/// There is no SO_REUSEADDR here, and no SO_REUSEPORT: a port that somebody else listens on must be refused.
fn socket(domain: Domain, addr: SocketAddr, fwmark: u32) -> io::Result<Option<Socket>> {
    // Non-blocking: `MSG_DONTWAIT` would do, but the intent shall be seen on the descriptor as well.
    let socket = match Socket::new(domain, Type::DGRAM.nonblocking(), Some(Protocol::UDP)) {
        Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => return Ok(None),
        other => other?,
    };
    let fd = socket.as_fd();
    //@ C-OUT-5
    if domain == Domain::IPV4 {
        set_option(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
        set_option(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
        set_option(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    } else {
        socket.set_only_v6(true)?;
        set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT)?;
        set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
    }
    // Beyond the system's limit with CAP_NET_ADMIN, up to it without. What was granted is reported, so a
    // refusal is no error.
    if set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER as i32).is_err() {
        let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    }
    if set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SEND_BUFFER as i32).is_err() {
        let _ = socket.set_send_buffer_size(SEND_BUFFER);
    }
    if fwmark != 0 {
        socket.set_mark(fwmark)?;
    }
    match socket.bind(&addr.into()) {
        // Such a family exists, but has no address at all.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => Ok(None),
        other => other.map(|()| Some(socket)),
    }
}
