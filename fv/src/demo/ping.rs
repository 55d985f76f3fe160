//! Echo requests through the tunnel, one after the other, timed: ICMP, or UDP where raw sockets are forbidden.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use crate::namespace::Namespace;

/// Bytes after the ICMP header, as `ping` sends.
const DATA: usize = 56;
/// An answer later than this counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);

/// What came of some echo requests.
#[derive(Clone, Debug)]
pub(crate) struct Pings {
    /// `ICMP` or `UDP`.
    pub(crate) kind: &'static str,
    /// Requests sent.
    pub(crate) sent: usize,
    /// Round-trip times of those that were answered, sorted.
    pub(crate) times: Vec<Duration>,
}

impl Pings {
    /// The time that `percent` of the answers did not exceed.
    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        let last = self.times.len().saturating_sub(1);
        self.times.get((self.times.len() * percent / 100).min(last)).copied().unwrap_or_default()
    }

    /// Every request was answered.
    pub(crate) fn complete(&self) -> bool {
        self.sent > 0 && self.sent == self.times.len()
    }
}

/// Sends `count` echo requests to `to`, from `from` to `target`'s host, `pause` apart, until `stop` says so.
///
/// # Errors
/// When sockets cannot be had.
pub(crate) fn ping(
    hosts: (&Namespace, &Namespace),
    to: IpAddr,
    count: usize,
    pause: Duration,
    stop: Option<&AtomicBool>,
) -> io::Result<Pings> {
    let (from, target) = hosts;
    let stopped = || stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) || super::interrupted();
    match from.run(|| Icmp::open(to))? {
        Ok(icmp) => series("ICMP", count, pause, stopped, |sequence| icmp.once(sequence)),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let echo = target.run(|| UdpSocket::bind(SocketAddr::new(to, 0)))??;
            let socket = from.run(|| {
                let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
                let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
                socket.connect(echo.local_addr()?)?;
                socket.set_read_timeout(Some(PATIENCE))?;
                Ok::<_, io::Error>(socket)
            })??;
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| answer(&echo, &done));
                let pings = series("UDP", count, pause, stopped, |sequence| udp_once(&socket, sequence));
                done.store(true, Ordering::Relaxed);
                pings
            })
        }
        Err(e) => Err(e),
    }
}

fn series(
    kind: &'static str,
    count: usize,
    pause: Duration,
    stopped: impl Fn() -> bool,
    mut once: impl FnMut(u16) -> io::Result<Option<Duration>>,
) -> io::Result<Pings> {
    let mut pings = Pings { kind, sent: 0, times: Vec::with_capacity(count.min(4096)) };
    // Not counted: a kernel drops what comes in the first moment after an IPv6 address was set, which it readies later.
    once(0)?;
    while pings.sent < count && !stopped() {
        pings.sent += 1;
        pings.times.extend(once(pings.sent as u16)?);
        std::thread::sleep(pause);
    }
    pings.times.sort_unstable();
    Ok(pings)
}

/// A raw ICMP socket to one address.
struct Icmp {
    socket: Socket,
    ipv6: bool,
}

impl Icmp {
    fn open(to: IpAddr) -> io::Result<Self> {
        let ipv6 = to.is_ipv6();
        let socket = if ipv6 {
            Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?
        } else {
            Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?
        };
        socket.connect(&SocketAddr::new(to, 0).into())?;
        Ok(Self { socket, ipv6 })
    }

    /// One request and its answer; `None` when there is none in time.
    fn once(&self, sequence: u16) -> io::Result<Option<Duration>> {
        // Type 8 and 0 in IPv4, 128 and 129 in IPv6; the kernel fills in the checksum of IPv6 only.
        let (request, reply) = if self.ipv6 { (128, 129) } else { (8, 0) };
        let mut packet = [0; 8 + DATA];
        packet[0] = request;
        packet[4..6].copy_from_slice(&IDENTIFIER.to_be_bytes());
        packet[6..8].copy_from_slice(&sequence.to_be_bytes());
        if !self.ipv6 {
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        let start = Instant::now();
        // Before the handshake is done there may be no buffer space; the answer is then missing, no more.
        if let Err(e) = (&self.socket).write(&packet) {
            return if e.kind() == io::ErrorKind::PermissionDenied { Err(e) } else { Ok(None) };
        }
        let mut buffer = [0; 256];
        while let Some(left) = PATIENCE.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            self.socket.set_read_timeout(Some(left))?;
            let length = match (&self.socket).read(&mut buffer) {
                Ok(length) => length,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Ok(None),
            };
            // A raw IPv4 socket gives the IP header too.
            let header = if self.ipv6 { 0 } else { usize::from(buffer[0] & 15) * 4 };
            let Some(answer) = buffer.get(header..length) else { continue };
            if answer.first() == Some(&reply) && answer.get(4..8) == packet.get(4..8) {
                return Ok(Some(start.elapsed()));
            }
        }
        Ok(None)
    }
}

/// Marks our requests among those of others; there are no others in our namespaces.
const IDENTIFIER: u16 = 0x6676;

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn udp_once(socket: &UdpSocket, sequence: u16) -> io::Result<Option<Duration>> {
    let mut packet = [0; 8 + DATA];
    packet[..2].copy_from_slice(&sequence.to_be_bytes());
    let start = Instant::now();
    let _ = socket.send(&packet);
    let mut buffer = [0; 256];
    while start.elapsed() < PATIENCE {
        match socket.recv(&mut buffer) {
            Ok(length) if buffer.get(..length) == Some(&packet) => return Ok(Some(start.elapsed())),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(None),
        }
    }
    Ok(None)
}

fn answer(socket: &UdpSocket, done: &AtomicBool) {
    let mut buffer = [0; 256];
    let _ = socket.set_read_timeout(Some(Duration::from_millis(100)));
    while !done.load(Ordering::Relaxed) {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::alone;

    #[test]
    fn loopback_answers_icmp_of_both_families() {
        alone(|| {
            let host = Namespace::new().unwrap();
            for to in ["127.0.0.1", "::1"] {
                let pings = ping((&host, &host), to.parse().unwrap(), 20, Duration::ZERO, None).unwrap();
                assert!(pings.complete() && pings.kind == "ICMP", "{pings:?}");
                assert!(pings.percentile(50) <= pings.percentile(99));
            }
        });
    }

    #[test]
    fn udp_echo_stands_in_for_icmp() {
        let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(echo.local_addr().unwrap()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| answer(&echo, &done));
            let pings = series("UDP", 5, Duration::ZERO, || false, |n| udp_once(&socket, n)).unwrap();
            done.store(true, Ordering::Relaxed);
            assert!(pings.complete(), "{pings:?}");
        });
    }

    #[test]
    fn percentiles_are_taken_from_the_sorted_answers() {
        let times = (1..=200).map(Duration::from_millis).collect();
        let pings = Pings { kind: "ICMP", sent: 201, times };
        assert_eq!([50, 99, 100].map(|p| pings.percentile(p).as_millis()), [101, 199, 200]);
        assert!(!pings.complete());
        let none = Pings { kind: "ICMP", sent: 0, times: Vec::new() };
        assert!(!none.complete() && none.percentile(50).is_zero());
    }

    #[test]
    fn the_checksum_is_that_of_rfc_1071() {
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    }
}
