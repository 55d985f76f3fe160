//! The datapath without a kernel: two workers on queues that hand out what is there already, turn by turn.
//!
//! `instructions SCENARIO` runs one of [`SCENARIOS`]; `.ci/gate` runs it under callgrind and counts what happens in
//! [`measured`]. Without an argument it prints the scenarios, each with the number of packets that it carries.

use std::cell::RefCell;
use std::io::{ErrorKind, IoSlice, Result};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use forestvpn_quantum::batch::{Ecn, Endpoint, Envelope, Outbox, Train, Unsent};
use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerUpdate};
use forestvpn_quantum::io::{Poller, RxMeta, RxSlots, TunCaps, TunQueue, UdpCaps, UdpCounters, UdpQueue};
use forestvpn_quantum::offload::VnetHdr;
use forestvpn_quantum::time::{Clock, Entropy, Instant, Now};
use forestvpn_quantum::{Device, DeviceConfig, PrivateKey, Worker};

struct Scenario {
    name: &'static str,
    inward: bool,
    /// Length of each IP packet.
    size: usize,
    /// Packets of one read.
    train: usize,
    /// Turns of the worker, each of one read.
    turns: usize,
}

const SCENARIOS: [Scenario; 5] = [
    Scenario { name: "out-64", inward: false, size: 64, train: 1, turns: 1000 },
    Scenario { name: "out-1420", inward: false, size: 1420, train: 1, turns: 1000 },
    Scenario { name: "out-45x1420", inward: false, size: 1420, train: 45, turns: 40 },
    Scenario { name: "in-64", inward: true, size: 64, train: 1, turns: 1000 },
    Scenario { name: "in-45x1420", inward: true, size: 1420, train: 45, turns: 40 },
];

type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Splitmix64: every run is the same.
struct Seeded(u64);

impl Entropy for Seeded {
    fn fill(&mut self, out: &mut [u8]) {
        for byte in out {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            *byte = (z ^ (z >> 31)) as u8;
        }
    }
}

/// It is always the same moment.
struct Stopped;

const NOW: Now =
    Now { mono: Instant::from_nanos(1_000_000_000_000), unix: Duration::from_secs(1_700_000_000) };

impl Clock for Stopped {
    fn now(&mut self) -> Now {
        NOW
    }
}

/// A TUN device that gives the same packet again and again, and throws away what it is given.
#[derive(Default)]
struct Tun {
    hdr: VnetHdr,
    packet: Vec<u8>,
    /// How often it may still be read.
    reads: usize,
    /// The packet lies where the worker reads it: nothing there changes it.
    laid: bool,
    /// Writes and their bytes.
    written: (usize, usize),
}

impl TunQueue for Tun {
    fn recv(&mut self, buf: &mut [u8]) -> Result<(usize, VnetHdr)> {
        if self.reads == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.reads -= 1;
        if !self.laid {
            buf[..self.packet.len()].copy_from_slice(&self.packet);
            self.laid = true;
        }
        Ok((self.packet.len(), self.hdr))
    }

    fn send(&mut self, _: &VnetHdr, parts: &[IoSlice<'_>]) -> Result<()> {
        self.written.0 += 1;
        self.written.1 += parts.iter().map(|part| part.len()).sum::<usize>();
        Ok(())
    }

    fn caps(&self) -> TunCaps {
        TunCaps { vnet: true, tso: true, uso: true }
    }

    fn attach(&mut self, _: &Poller) -> Result<()> {
        Ok(())
    }
}

/// One UDP read or send: datagrams of `stride` bytes back to back.
struct Batch {
    stride: usize,
    bytes: Vec<u8>,
}

/// What is under way to one end, the next one last.
type Wire = Rc<RefCell<Vec<Batch>>>;

/// A UDP socket that gives what lies on the wire and counts what it is given, or puts that on the wire too.
struct Udp {
    from: SocketAddr,
    wire: Wire,
    /// Where to; `None`: only counted.
    far: Option<Wire>,
    sent: usize,
}

impl UdpQueue for Udp {
    fn recv(&mut self, slots: &mut RxSlots) -> Result<usize> {
        slots.clear();
        let Some(Batch { stride, bytes }) = self.wire.borrow_mut().pop() else {
            return Err(ErrorKind::WouldBlock.into());
        };
        let (near, far) = slots.buffers(0).ok_or(ErrorKind::OutOfMemory)?;
        let (head, rest) = bytes.split_at(bytes.len().min(near.len()));
        near[..head.len()].copy_from_slice(head);
        far[..rest.len()].copy_from_slice(rest);
        let from = Endpoint::new(self.from);
        slots.push(RxMeta { slot: 0, len: bytes.len(), stride, from, ecn: Ecn::NotEct });
        // To be given back is the kernel's trouble, not ours.
        std::mem::forget(bytes);
        Ok(1)
    }

    fn send(&mut self, trains: &[Train<'_>], _: &mut Unsent) -> Result<usize> {
        for train in trains {
            self.sent += train.count();
            if let Some(far) = &self.far {
                let batch = Batch { stride: train.stride, bytes: train.bytes.to_vec() };
                far.borrow_mut().insert(0, batch);
            }
        }
        Ok(trains.len())
    }

    fn caps(&self) -> UdpCaps {
        UdpCaps { gso_segments: 64, gro: true }
    }

    fn open(&mut self, port: u16, _: u32) -> Result<u16> {
        Ok(port)
    }

    fn close(&mut self) {}

    fn port(&self) -> Option<u16> {
        None
    }

    fn attach(&mut self, _: &Poller) -> Result<()> {
        Ok(())
    }

    fn poll_lost_source(&mut self) -> Option<Endpoint> {
        None
    }

    fn counters(&self) -> UdpCounters {
        UdpCounters::default()
    }
}

type End = Worker<Tun, Udp, Stopped>;

fn key(host: u8) -> PrivateKey {
    PrivateKey::new([host + 1; 32])
}

fn outer(host: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, host + 1], 51820))
}

/// Two workers that know each other and have shaken hands; the first one sent a packet and the second has it.
fn pair() -> Outcome<[End; 2]> {
    let wires = [Wire::default(), Wire::default()];
    let end = |host: u8| -> Outcome<End> {
        let mut device = Device::new(DeviceConfig::default(), Box::new(Seeded(host.into())));
        let mut peer = PeerUpdate::new(key(1 - host).public_key());
        peer.endpoint = Some(outer(1 - host));
        peer.allowed_ips = vec![AllowedIp { net: format!("10.0.0.{}/32", 2 - host).parse()?, remove: false }];
        let update =
            DeviceUpdate { private_key: Some(Some(key(host))), peers: vec![peer], ..Default::default() };
        let [near, far] = [host, 1 - host].map(|h| Rc::clone(&wires[usize::from(h)]));
        let mut nothing = Nothing;
        device.configure(&update, NOW, &mut nothing).map_err(|e| format!("{e:?}"))?;
        device.set_up(true, NOW, &mut nothing);
        let udp = Udp { from: outer(1 - host), wire: near, far: Some(far), sent: 0 };
        Ok(Worker::new(device, Tun::default(), udp, Stopped)?.0)
    };
    let mut ends = [end(0)?, end(1)?];
    load(&mut ends[0], 100, 1);
    for _ in 0..16 {
        ends[0].turn()?;
        ends[1].turn()?;
    }
    if ends[1].tun().written != (1, 100) {
        return Err("the first packet did not arrive".into());
    }
    Ok(ends)
}

/// An outbox for a device that has nothing to say yet.
struct Nothing;

impl Outbox for Nothing {
    fn reserve(&mut self, _: &Envelope, _: usize, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn commit(&mut self, _: usize) {}
}

/// Lets one TCP packet, or a super-packet that stands for `count` of them, wait at the TUN device, to be read once.
fn load(end: &mut End, size: usize, count: usize) {
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    packet.extend([0x13, 0x88, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    packet.resize(40 + (size - 40) * count, 0x5a);
    let len = packet.len() as u16;
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    let cut = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type: VnetHdr::GSO_TCPV4,
        hdr_len: 40,
        gso_size: (size - 40) as u16,
        csum_start: 20,
        csum_offset: 16,
    };
    let hdr = if count == 1 { VnetHdr::default() } else { cut };
    *end.tun() = Tun { hdr, packet, reads: 1, ..Tun::default() };
}

/// What is counted: nothing but the turns of one worker.
#[inline(never)]
fn measured(end: &mut End, turns: usize, outward: bool) -> Outcome<()> {
    for _ in 0..turns {
        if outward {
            end.tun().reads = 1;
        }
        end.turn()?;
    }
    Ok(())
}

fn run(scenario: &Scenario) -> Outcome<()> {
    let Scenario { inward, size, train, turns, .. } = *scenario;
    let packets = train * turns;
    let [mut a, mut b] = pair()?;
    load(&mut a, size, train);
    // Once outside of the count: what is needed only the first time.
    a.turn()?;
    b.turn()?;
    if inward {
        for _ in 0..turns {
            a.tun().reads = 1;
            a.turn()?;
        }
        b.tun().written = (0, 0);
        measured(&mut b, turns, false)?;
        let bytes = turns * (40 + (size - 40) * train);
        if b.tun().written != (turns, bytes) {
            return Err(format!("{:?} written instead of {turns} joined packets", b.tun().written).into());
        }
    } else {
        a.udp().far = None;
        a.udp().sent = 0;
        measured(&mut a, turns, true)?;
        if a.udp().sent != packets {
            return Err(format!("{} sent instead of {packets}", a.udp().sent).into());
        }
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let Some(name) = std::env::args().nth(1) else {
        for Scenario { name, train, turns, .. } in SCENARIOS {
            println!("{name} {}", train * turns);
        }
        return Ok(());
    };
    let scenario = SCENARIOS.iter().find(|s| s.name == name).ok_or("no such scenario")?;
    run(scenario)
}
