//! A listener on a host's cables: what WireGuard messages went over them, when, and which way. Used where a test
//! is about what must be on the wire, or must not.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::ReceiveTimeout;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::host::Host;

/// One UDP datagram seen on a cable.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    /// IPv4 TOS or IPv6 traffic class: DSCP and ECN.
    pub(crate) class: u8,
    pub(crate) payload: Vec<u8>,
}

impl Seen {
    pub(crate) fn is_initiation(&self) -> bool {
        self.payload.len() == 148 && self.payload[..4] == [1, 0, 0, 0]
    }

    pub(crate) fn is_response(&self) -> bool {
        self.payload.len() == 92 && self.payload[..4] == [2, 0, 0, 0]
    }

    pub(crate) fn is_keepalive(&self) -> bool {
        self.payload.len() == 32 && self.payload[..4] == [4, 0, 0, 0]
    }

    pub(crate) fn is_data(&self) -> bool {
        self.payload.len() >= 32 && self.payload[..4] == [4, 0, 0, 0]
    }
}

/// Listens until dropped. Datagrams are noted once each, whichever way they go (loopback's, twice).
pub(crate) struct Capture {
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Capture {
    /// `port`: only datagrams from or to it; 0 for all.
    #[track_caller]
    pub(crate) fn on(host: &Host, port: u16) -> Self {
        let (seen, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (there, note) = (Arc::clone(&stop), Arc::clone(&seen));
        let socket = host.enter(|| {
            let socket = socket(
                AddressFamily::Packet,
                SockType::Datagram,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::EthAll,
            )
            .expect("packet socket");
            setsockopt(&socket, ReceiveTimeout, &TimeVal::milliseconds(50)).expect("timeout");
            socket
        });
        let (started, start) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            started.send(()).expect("the test waits");
            let mut buffer = vec![0; 70_000];
            while !there.load(Ordering::Relaxed) {
                let Ok((len, Some(_))) = recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer) else {
                    continue;
                };
                let Some(datagram) = parse(&buffer[..len]) else { continue };
                if port == 0 || datagram.from.port() == port || datagram.to.port() == port {
                    note.lock().unwrap_or_else(PoisonError::into_inner).push(datagram);
                }
            }
        });
        start.recv().expect("listener runs");
        Self { seen, stop, thread: Some(thread) }
    }

    /// What was seen so far and fits.
    pub(crate) fn seen(&self, fits: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        std::thread::sleep(Duration::from_millis(20));
        let all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|seen| fits(seen)).cloned().collect()
    }

    /// How many were seen so far and fit.
    pub(crate) fn count(&self, fits: impl Fn(&Seen) -> bool) -> usize {
        self.seen(fits).len()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn parse(packet: &[u8]) -> Option<Seen> {
    let (src, dst, class, udp): (IpAddr, IpAddr, u8, &[u8]) = match packet.first()? >> 4 {
        4 if *packet.get(9)? == 17 => {
            let header = usize::from(packet.first()? & 15) * 4;
            let address = |at: usize| <[u8; 4]>::try_from(packet.get(at..at + 4)?).ok().map(Ipv4Addr::from);
            (address(12)?.into(), address(16)?.into(), *packet.get(1)?, packet.get(header..)?)
        }
        6 if *packet.get(6)? == 17 => {
            let address = |at: usize| <[u8; 16]>::try_from(packet.get(at..at + 16)?).ok().map(Ipv6Addr::from);
            let class = (packet.first()? << 4) | (packet.get(1)? >> 4);
            (address(8)?.into(), address(24)?.into(), class, packet.get(40..)?)
        }
        _ => return None,
    };
    let number = |at: usize| Some(u16::from_be_bytes(udp.get(at..at + 2)?.try_into().ok()?));
    Some(Seen {
        at: Instant::now(),
        from: SocketAddr::new(src, number(0)?),
        to: SocketAddr::new(dst, number(2)?),
        class,
        payload: udp.get(8..usize::from(number(4)?))?.to_vec(),
    })
}
