//! The demo where no TUN device is to be had: the same two ends, in this process, with their TUN devices in
//! memory and their UDP sockets on loopback. It says nothing about TCP: there is no TCP in it.

use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forestvpn_quantum::config::{AllowedIp, DeviceSnapshot, DeviceUpdate, PeerUpdate};
use forestvpn_quantum::io::mem::{MemTun, tun_pair};
use forestvpn_quantum::io::{BootClock, Poller, TunQueue, Udp};
use forestvpn_quantum::offload::VnetHdr;
use forestvpn_quantum::time::{Clock, Entropy, OsEntropy};
use forestvpn_quantum::{Counters, Device, DeviceConfig, Fatal, Handle, PrivateKey, Worker};
use sha2::{Digest, Sha256};

use super::bulk::{Progress, megabits};
use super::ping::Pings;

const MTU: u16 = 1420;
/// Packets that may wait in a TUN device.
const QUEUE: usize = 1024;
/// Packets under way; few enough for the smallest socket buffer.
const WINDOW: u64 = 64;
/// Nothing arrives for so long: what is missing was lost, and is sent again.
const PATIENCE: Duration = Duration::from_millis(300);
/// Nothing arrives for so long: the ends do not work.
const DESPAIR: Duration = Duration::from_secs(10);

/// One end: a worker on a thread of its own, and our side of its TUN device.
pub(crate) struct End {
    /// Our side.
    tun: MemTun,
    wait: Poller,
    handle: Handle,
    thread: Option<JoinHandle<Result<(), Fatal>>>,
    key: PrivateKey,
}

impl End {
    fn start(name: &str) -> io::Result<Self> {
        let (ours, theirs) = tun_pair(QUEUE);
        let config = DeviceConfig { mtu: MTU, ..DeviceConfig::default() };
        let device = Device::new(config, Box::new(OsEntropy));
        let (mut worker, handle) = Worker::new(device, theirs, Udp::new(), BootClock::default())?;
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || worker.run())?;
        let wait = Poller::new()?;
        let mut tun = ours;
        tun.attach(&wait)?;
        let mut bytes = [0; 32];
        OsEntropy.fill(&mut bytes);
        let key = PrivateKey::new(bytes);
        let end = Self { tun, wait, handle, thread: Some(thread), key };
        end.handle
            .configure(DeviceUpdate { private_key: Some(Some(end.key.clone())), ..DeviceUpdate::default() })
            .map_err(io::Error::other)?;
        end.handle.set_link(true, MTU).map_err(io::Error::other)?;
        Ok(end)
    }

    /// Makes `other` the only peer, for everything.
    fn join(&self, other: &Self) -> io::Result<()> {
        let port = other.snapshot()?.listen_port;
        let allowed = ["0.0.0.0/0", "::/0"].into_iter().flat_map(str::parse);
        let peer = PeerUpdate {
            endpoint: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
            allowed_ips: allowed.map(|net| AllowedIp { net, remove: false }).collect(),
            ..PeerUpdate::new(other.key.public_key())
        };
        let update = DeviceUpdate { peers: vec![peer], ..DeviceUpdate::default() };
        self.handle.configure(update).map_err(io::Error::other)
    }

    fn snapshot(&self) -> io::Result<DeviceSnapshot> {
        self.handle.snapshot().map_err(io::Error::other)
    }

    fn send(&mut self, packet: &[u8]) -> bool {
        self.tun.send(&VnetHdr::default(), &[IoSlice::new(packet)]).is_ok()
    }

    /// The next packet that came out of the tunnel, waiting at most so long.
    fn receive<'a>(&mut self, buffer: &'a mut [u8], longest: Duration) -> io::Result<Option<&'a [u8]>> {
        let end = Instant::now() + longest;
        loop {
            match self.tun.recv(buffer) {
                Ok((length, _)) => return Ok(buffer.get(..length)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let now = BootClock::default().now().mono;
            self.wait.park(now, Some(now.after(left)))?;
        }
    }

    fn counters(&self) -> io::Result<Counters> {
        self.handle.counters().map_err(io::Error::other)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            log::error!("an end crashed");
        }
    }
}

/// What came of it.
pub(crate) struct Report {
    /// From the first packet to its arrival: the handshake and one way.
    pub(crate) handshake: Duration,
    /// One packet there and back, by family inside: IPv4, IPv6.
    pub(crate) pings: [Pings; 2],
    /// Left to right over IPv4, right to left over IPv6.
    pub(crate) flows: [Flow; 2],
    /// How both ends saw each other at the end.
    pub(crate) ends: [DeviceSnapshot; 2],
    /// What both ends counted.
    pub(crate) counters: [Counters; 2],
}

/// A stream of packets in one direction.
pub(crate) struct Flow {
    /// Packets that arrived, each once.
    pub(crate) packets: u64,
    /// Bytes in them, IP headers included.
    pub(crate) bytes: u64,
    /// Packets that were sent once more because they did not arrive.
    pub(crate) again: u64,
    /// From the first to the last.
    pub(crate) time: Duration,
    /// Of the contents, as sent and as received.
    pub(crate) hashes: [[u8; 32]; 2],
}

impl Flow {
    /// What arrived is what was sent.
    pub(crate) fn intact(&self) -> bool {
        self.packets > 0 && self.hashes[0] == self.hashes[1]
    }
}

/// Runs the two ends and moves `megabytes` through them, half of it each way.
///
/// # Errors
/// When an end does not start or nothing arrives.
pub(crate) fn run(megabytes: u64) -> io::Result<Report> {
    let mut ends = [End::start("left")?, End::start("right")?];
    ends[0].join(&ends[1])?;
    ends[1].join(&ends[0])?;

    let start = Instant::now();
    let mut buffer = vec![0; usize::from(MTU)];
    let [left, right] = &mut ends;
    left.send(&packet(false, 0, &[]));
    if right.receive(&mut buffer, DESPAIR)?.is_none() {
        return Err(io::Error::other("the two ends do not reach each other over 127.0.0.1"));
    }
    let handshake = start.elapsed();

    let pings = [echo(left, right, false)?, echo(left, right, true)?];
    let flows = [
        flow(left, right, false, megabytes.div_ceil(2), "left to right, IPv4")?,
        flow(right, left, true, megabytes.div_ceil(2), "right to left, IPv6")?,
    ];
    let counters = [left.counters()?, right.counters()?];
    let ends = [left.snapshot()?, right.snapshot()?];
    Ok(Report { handshake, pings, flows, ends, counters })
}

/// Packets there and back, one at a time.
fn echo(left: &mut End, right: &mut End, ipv6: bool) -> io::Result<Pings> {
    const COUNT: usize = 1000;
    let mut pings = Pings { kind: "packets", sent: 0, times: Vec::with_capacity(COUNT) };
    let mut buffer = vec![0; usize::from(MTU)];
    for number in 0..COUNT {
        let bytes = packet(ipv6, number as u64, &[0; 56]);
        let start = Instant::now();
        pings.sent += 1;
        left.send(&bytes);
        let Some(there) = right.receive(&mut buffer, Duration::from_secs(1))? else { continue };
        let there = there.to_vec();
        right.send(&there);
        if left.receive(&mut buffer, Duration::from_secs(1))? == Some(&bytes) {
            pings.times.push(start.elapsed());
        }
    }
    pings.times.sort_unstable();
    Ok(pings)
}

/// A stream of full packets, in order, at most [`WINDOW`] of them under way. UDP may lose some: then all from
/// the first missing one on are sent again.
fn flow(from: &mut End, to: &mut End, ipv6: bool, megabytes: u64, label: &str) -> io::Result<Flow> {
    let room = usize::from(MTU) - header(ipv6, 0, 0).len();
    let total = (megabytes << 20).div_ceil(room as u64);
    let mut block = vec![0; room + 4096];
    OsEntropy.fill(&mut block);
    // Each packet is another piece of the block, so that one in the place of another is noticed.
    let content = |number: u64| {
        let at = (number % 4096) as usize;
        block.get(at..at + room).unwrap_or_default()
    };
    let mut sent = Sha256::new();
    (0..total).for_each(|number| sent.update(content(number)));

    let mut received = Sha256::new();
    let mut buffer = vec![0; usize::from(MTU)];
    let (mut next, mut arrived, mut again) = (0, 0, 0);
    let mut progress = Progress::new(label, megabytes);
    let start = Instant::now();
    let mut last = start;
    while arrived < total {
        if super::interrupted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        while next < total && next < arrived + WINDOW && from.send(&packet(ipv6, next, content(next))) {
            next += 1;
        }
        match to.receive(&mut buffer, PATIENCE)? {
            Some(bytes) => {
                if let Some(content) = unpack(ipv6, arrived, bytes) {
                    received.update(content);
                    arrived += 1;
                    last = Instant::now();
                }
            }
            None if last.elapsed() > DESPAIR => {
                return Err(io::Error::other("packets do not arrive any more"));
            }
            None => {
                again += next - arrived;
                next = arrived;
            }
        }
        if arrived % 64 == 0 {
            progress.show(arrived * room as u64, start.elapsed());
        }
    }
    let time = start.elapsed();
    let bytes = total * u64::from(MTU);
    progress.end(total * room as u64, time);
    log::debug!("{label}: {:.0} Mbit/s", megabits(bytes, time));
    Ok(Flow {
        packets: total,
        bytes,
        again,
        time,
        hashes: [sent.finalize().into(), received.finalize().into()],
    })
}

/// An IP header with UDP's protocol number and our packet number behind it.
fn header(ipv6: bool, number: u64, content: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(usize::from(MTU));
    let length = |own: usize| u16::try_from(own + 8 + content).unwrap_or(u16::MAX).to_be_bytes();
    if ipv6 {
        bytes.extend([0x60, 0, 0, 0]);
        bytes.extend(length(0));
        bytes.extend([17, 64]);
        bytes.extend(Ipv6Addr::LOCALHOST.octets());
        bytes.extend(Ipv6Addr::LOCALHOST.octets());
    } else {
        bytes.extend([0x45, 0]);
        bytes.extend(length(20));
        bytes.extend([0, 0, 0, 0, 64, 17, 0, 0]);
        bytes.extend(Ipv4Addr::LOCALHOST.octets());
        bytes.extend(Ipv4Addr::LOCALHOST.octets());
    }
    bytes.extend(number.to_be_bytes());
    bytes
}

fn packet(ipv6: bool, number: u64, content: &[u8]) -> Vec<u8> {
    let mut bytes = header(ipv6, number, content.len());
    bytes.extend(content);
    bytes
}

/// The content of a packet, if it is number `number`.
fn unpack(ipv6: bool, number: u64, packet: &[u8]) -> Option<&[u8]> {
    let start = header(ipv6, number, packet.len().checked_sub(header(ipv6, 0, 0).len())?);
    packet.strip_prefix(start.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_both_families_arrive_in_order_and_whole() {
        let report = run(2).unwrap();
        assert!(report.flows.iter().all(Flow::intact));
        assert!(report.pings.iter().all(Pings::complete));
        for (end, counters) in report.ends.iter().zip(&report.counters) {
            let [peer] = &end.peers[..] else { panic!("one peer") };
            assert!(peer.last_handshake.is_some() && peer.tx_bytes > 1 << 20 && peer.rx_bytes > 1 << 20);
            assert!(counters.get("udp_sent").unwrap() > 700);
        }
    }

    #[test]
    fn only_the_expected_packet_is_unpacked() {
        for ipv6 in [false, true] {
            let bytes = packet(ipv6, 7, b"content");
            assert_eq!(unpack(ipv6, 7, &bytes), Some(&b"content"[..]));
            assert_eq!(unpack(ipv6, 8, &bytes), None);
            assert_eq!(unpack(!ipv6, 7, &bytes), None);
            assert_eq!(unpack(ipv6, 7, &[]), None);
        }
    }
}
