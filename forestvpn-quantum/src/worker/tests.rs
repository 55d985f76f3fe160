//! Two workers on a wire in memory, turned by hand on a virtual clock; then on threads of their own.

use std::cell::Cell;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::batch::{Endpoint, LocalAddr};
use crate::config::{AllowedIp, PeerUpdate};
use crate::device::DeviceConfig;
use crate::event::GivenUp;
use crate::handle::Gone;
use crate::harness::{A, B, EPOCH, Seeded, packet};
use crate::io::mem::{MemTun, MemUdp, tun_pair, udp_pair};
use crate::io::{BootClock, Udp};
use crate::key::PrivateKey;
use crate::offload::checksum;
use crate::time::OsEntropy;

const MTU: u16 = 1420;

#[derive(Clone)]
struct Wound(Rc<Cell<Duration>>);

impl Clock for Wound {
    fn now(&mut self) -> Now {
        let passed = self.0.get();
        Now { mono: Instant::ZERO.after(Duration::from_secs(1000) + passed), unix: EPOCH + passed }
    }
}

fn key(host: usize) -> PrivateKey {
    PrivateKey::new([host as u8 + 1; 32])
}

fn outer(host: usize) -> SocketAddr {
    format!("192.0.2.{}:{}", host + 1, 51820 + host).parse().unwrap()
}

/// `host` as seen by the other one.
fn peer(host: usize, endpoint: Option<SocketAddr>) -> PeerUpdate {
    let net = format!("10.0.0.{}/32", host + 1).parse().unwrap();
    PeerUpdate {
        endpoint,
        allowed_ips: vec![AllowedIp { net, remove: false }],
        ..PeerUpdate::new(key(host).public_key())
    }
}

fn update(host: usize, other: PeerUpdate) -> DeviceUpdate {
    DeviceUpdate { private_key: Some(Some(key(host))), peers: vec![other], ..Default::default() }
}

/// A worker and the machine on the other side of its TUN device.
struct End {
    worker: Worker<MemTun, MemUdp, Wound>,
    handle: Handle,
    machine: MemTun,
}

impl End {
    fn give(&mut self, packet: &[u8]) {
        self.machine.send(&VnetHdr::default(), &[IoSlice::new(packet)]).unwrap();
    }

    fn taken(&mut self) -> Vec<Vec<u8>> {
        let mut buf = vec![0; 65_536];
        std::iter::from_fn(|| self.machine.recv(&mut buf).ok().map(|(len, _)| buf[..len].to_vec())).collect()
    }

    fn now(&mut self) -> Now {
        self.worker.clock.now()
    }

    fn count(&self, name: &str) -> u64 {
        self.worker.counters().get(name).unwrap()
    }

    fn configure(&mut self, update: &DeviceUpdate) -> Result<(), ConfigureError> {
        let now = self.now();
        self.worker.configure(update, now)
    }

    fn set_link(&mut self, up: bool) -> Result<(), ConfigureError> {
        let now = self.now();
        self.worker.set_link(up, MTU, now)
    }
}

struct Rig {
    ends: [End; 2],
    clock: Rc<Cell<Duration>>,
}

impl Rig {
    /// Two ends that know each other, up, without a session.
    fn new() -> Self {
        let clock = Rc::new(Cell::new(Duration::ZERO));
        let (first, second) = udp_pair(outer(A), outer(B), 4096);
        let end = |host: usize, udp| {
            let (inside, machine) = tun_pair(4096);
            let device = Device::new(DeviceConfig::default(), Box::new(Seeded(host as u64)));
            let (worker, handle) = Worker::new(device, inside, udp, Wound(Rc::clone(&clock))).unwrap();
            End { worker, handle, machine }
        };
        let mut ends = [end(A, first), end(B, second)];
        for host in [A, B] {
            let other = 1 - host;
            ends[host].configure(&update(host, peer(other, Some(outer(other))))).unwrap();
            ends[host].set_link(true).unwrap();
        }
        Self { ends, clock }
    }

    /// Two ends with a session.
    fn connected() -> Self {
        let mut rig = Self::new();
        rig.ends[A].give(&packet(A, B, b"first"));
        rig.settle();
        assert_eq!(rig.ends[B].taken(), [packet(A, B, b"first")]);
        rig
    }

    /// Turns until neither end has anything to do.
    fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..1000 {
            for end in &mut self.ends {
                quiet = if end.worker.turn().unwrap() == Park::Busy { 0 } else { quiet + 1 };
            }
            // Each once more after the other was quiet: what one sent the other has taken.
            if quiet > 3 {
                return;
            }
        }
        panic!("still busy after 1000 turns");
    }

    fn wait(&self, by: Duration) {
        self.clock.set(self.clock.get() + by);
    }
}

#[test]
fn packets_cross_both_ways_unchanged_and_in_order() {
    let mut rig = Rig::new();
    let numbered = |from, to| -> Vec<_> {
        (0..300_u32).map(|i| packet(from, to, &vec![i as u8; (i as usize * 41) % 1300])).collect()
    };
    // The first of these wait for the handshake; 128 may.
    numbered(A, B)[..100].iter().for_each(|p| rig.ends[A].give(p));
    rig.settle();
    numbered(A, B)[100..].iter().for_each(|p| rig.ends[A].give(p));
    numbered(B, A).iter().for_each(|p| rig.ends[B].give(p));
    rig.settle();
    assert_eq!(rig.ends[B].taken(), numbered(A, B));
    assert_eq!(rig.ends[A].taken(), numbered(B, A));
    assert_eq!(rig.ends[A].count("tun_read"), 300);
    assert_eq!(rig.ends[B].count("tun_written"), 300);
}

/// A TCP segment from A to B, as long as its payload makes it.
fn segment(port: u16, seq: u32, payload: &[u8]) -> Vec<u8> {
    let total = (40 + payload.len()) as u16;
    let mut p = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    p[2..4].copy_from_slice(&total.to_be_bytes());
    let sum = checksum::header(&p);
    p[10..12].copy_from_slice(&sum.to_be_bytes());
    p.extend(port.to_be_bytes());
    p.extend([0, 80]);
    p.extend(seq.to_be_bytes());
    p.extend([0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    p.extend(payload);
    let sum = !checksum::sum(&p[20..], checksum::pseudo(&p[12..20], 6, total - 20));
    p[36..38].copy_from_slice(&sum.to_be_bytes());
    p
}

#[test]
fn segments_of_a_flow_are_joined_across_datagrams_and_nothing_overtakes() {
    let mut rig = Rig::connected();
    rig.ends[B].worker.delivery.set_merging(true);
    let (short, long) = ([7; 1000], [8; 3000]);
    rig.ends[A].give(&segment(1, 0, &short));
    rig.ends[A].give(&segment(2, 0, &short));
    rig.ends[A].give(&segment(1, 1000, &short));
    rig.ends[A].give(&segment(2, 1000, &short));
    // Too long for the memory that the others lie in: a write of its own, after them.
    rig.ends[A].give(&segment(1, 2000, &long));
    rig.ends[A].give(&segment(1, 5000, &short));
    rig.ends[A].give(&segment(1, 6000, &short[..10]));
    rig.settle();
    let mut buf = vec![0; 65_536];
    let mut next = || {
        let (len, hdr) = rig.ends[B].machine.recv(&mut buf).ok()?;
        Some((buf[21], u32::from_be_bytes(buf[24..28].try_into().unwrap()), len, hdr.gso_size))
    };
    let writes: Vec<_> = std::iter::from_fn(&mut next).collect();
    assert_eq!(writes, [(1, 0, 2040, 1000), (2, 0, 2040, 1000), (1, 2000, 3040, 0), (1, 5000, 1050, 1000)]);
    let end = &rig.ends[B];
    assert_eq!((end.count("tun_merged_writes"), end.count("tun_merged_packets")), (3, 6));
}

#[test]
fn every_injected_error_costs_what_is_counted_and_no_more() {
    let mut rig = Rig::connected();
    let packets: Vec<_> = (0..40_u8).map(|i| packet(A, B, &[i; 100])).collect();
    rig.ends[A].worker.tun().faults.fail_recv(3, libc::ENOMEM);
    rig.ends[B].worker.tun().faults.fail_send(5, libc::EIO);
    rig.ends[B].worker.tun().faults.fail_send(7, libc::EINVAL);
    rig.ends[B].worker.udp().faults.fail_recv(1, libc::ECONNREFUSED);
    packets.iter().for_each(|p| rig.ends[A].give(p));
    rig.settle();
    let mut expected = packets;
    expected.remove(6);
    expected.remove(4);
    assert_eq!(rig.ends[B].taken(), expected);
    assert_eq!(rig.ends[A].count("tun_read_errors"), 1);
    assert_eq!((rig.ends[B].count("tun_lost_down"), rig.ends[B].count("tun_lost_refused")), (1, 1));
}

/// Errors of any kind at any call of both ends, links that fill up, turns at random: what goes in comes out once and in
/// order, or is counted, to the packet.
#[test]
fn whatever_fails_each_packet_arrives_in_order_or_is_counted() {
    let errors = [
        libc::EIO,
        libc::EINVAL,
        libc::EMSGSIZE,
        libc::EAGAIN,
        libc::ENOBUFS,
        libc::ENOMEM,
        libc::EPERM,
        libc::ENETUNREACH,
        libc::EINTR,
        libc::ECONNREFUSED,
        libc::EADDRNOTAVAIL,
        libc::ENODATA,
    ];
    for seed in 0..300 {
        let mut chance = Seeded(seed);
        let mut below = |n: u64| chance.next() % n;
        let mut rig = Rig::connected();
        rig.ends[B].worker.delivery.set_merging(below(2) == 0);
        let mut next = || (1 + below(80), errors[below(errors.len() as u64) as usize]);
        for end in &mut rig.ends {
            for _ in 0..6 {
                let [a, b, c, d] = [next(), next(), next(), next()];
                end.worker.tun().faults.fail_recv(a.0, a.1);
                end.worker.tun().faults.fail_send(b.0, b.1);
                end.worker.udp().faults.fail_recv(c.0, c.1);
                end.worker.udp().faults.fail_send(d.0, d.1);
            }
        }
        let mut given = [Vec::new(), Vec::new()];
        for i in 0..400_u32 {
            for (from, to) in [(A, B), (B, A)] {
                let tail = vec![i as u8; below(1200) as usize];
                let payload = [&i.to_be_bytes()[..], &tail].concat();
                // Some are of TCP, which the joiner looks at; none follows another.
                let bytes = if from == A && below(2) == 0 {
                    segment(1, i * 2000, &payload)
                } else {
                    packet(from, to, &payload)
                };
                rig.ends[from].give(&bytes);
                given[from].push(bytes);
            }
            for _ in 0..below(3) {
                let _ = rig.ends[below(2) as usize].worker.turn().unwrap();
            }
        }
        rig.settle();
        for (from, to) in [(A, B), (B, A)] {
            let mut expected = given[from].iter();
            let got = rig.ends[to].taken();
            for packet in &got {
                assert!(expected.any(|p| p == packet), "seed {seed}: a packet twice, changed or too late");
            }
            let sent = ["udp_lost_full", "udp_lost_refused", "no_room", "staging_full"]
                .map(|name| rig.ends[from].count(name));
            let written = ["tun_lost_down", "tun_lost_refused"].map(|name| rig.ends[to].count(name));
            let counted: u64 = sent.iter().chain(&written).sum();
            assert_eq!(400 - got.len() as u64, counted, "seed {seed}: {sent:?} {written:?}");
        }
    }
}

//@test C-OUT-3
#[test]
fn a_sender_without_a_peer_is_told_and_its_packet_is_counted() {
    let mut rig = Rig::connected();
    let mut lost = packet(A, B, b"x");
    lost[16..20].copy_from_slice(&[9, 9, 9, 9]);
    rig.ends[A].give(&lost);
    rig.ends[A].give(&packet(A, B, b"y"));
    rig.settle();
    let told = rig.ends[A].taken();
    assert_eq!(told.len(), 1);
    assert_eq!((&told[0][12..22], &told[0][28..]), (&[9, 9, 9, 9, 10, 0, 0, 1, 3, 1][..], &lost[..]));
    let counts = ["no_route", "tun_unreachable", "tun_written"].map(|name| rig.ends[A].count(name));
    assert_eq!(counts, [1, 1, 1]);
    assert_eq!(rig.ends[B].taken(), [packet(A, B, b"y")]);
    // While the interface goes down between the two, that answer is a counted loss.
    rig.ends[A].worker.tun().faults.fail_send(1, libc::EIO);
    rig.ends[A].give(&lost);
    rig.settle();
    assert_eq!((rig.ends[A].taken().len(), rig.ends[A].count("tun_lost_down")), (0, 1));
}

#[test]
fn what_the_sockets_refuse_is_counted_and_the_rest_arrives() {
    let mut rig = Rig::connected();
    for errno in [libc::EPERM, libc::ENETUNREACH, libc::EAGAIN] {
        rig.ends[A].worker.udp().faults.fail_send(1, errno);
        rig.ends[A].give(&packet(A, B, b"lost"));
        rig.settle();
    }
    assert_eq!(rig.ends[A].count("udp_lost_full"), 3);
    rig.ends[A].give(&packet(A, B, b"arrives"));
    rig.settle();
    assert_eq!(rig.ends[B].taken(), [packet(A, B, b"arrives")]);
}

#[test]
fn neither_direction_starves_the_other() {
    let mut rig = Rig::connected();
    for i in 0..1000_u16 {
        rig.ends[A].give(&packet(A, B, &i.to_be_bytes()));
        rig.ends[B].give(&packet(B, A, &i.to_be_bytes()));
    }
    while rig.ends[B].worker.turn().unwrap() == Park::Busy {}
    // A has 1000 packets on either side now and takes a share of both in one turn.
    let before = (rig.ends[A].count("udp_received"), rig.ends[A].count("tun_read"));
    assert_eq!(rig.ends[A].worker.turn().unwrap(), Park::Busy);
    let after = (rig.ends[A].count("udp_received"), rig.ends[A].count("tun_read"));
    assert_eq!((after.0 - before.0, after.1 - before.1), (RX_SLOTS as u64, FRAMES_PER_TURN as u64));
    rig.settle();
    assert_eq!((rig.ends[A].taken().len(), rig.ends[B].taken().len()), (1000, 1000));
}

#[test]
fn turn_parks_until_the_next_timer_and_serves_it_then() {
    let mut rig = Rig::connected();
    let keepalive = PeerUpdate { persistent_keepalive: Some(25), ..peer(B, None) };
    rig.ends[A].configure(&DeviceUpdate { peers: vec![keepalive], ..Default::default() }).unwrap();
    rig.settle();
    let sent = rig.ends[A].count("udp_sent");
    let Park::Until(deadline) = rig.ends[A].worker.turn().unwrap() else { panic!("a timer is pending") };
    let now = rig.ends[A].now().mono;
    assert!(deadline > now && deadline.since(now) <= Duration::from_secs(25));
    // Deadlines are repaired lazily, so the first may have nothing to do; 25 s cannot pass without one.
    for _ in 0..10 {
        if let Park::Until(at) = rig.ends[A].worker.turn().unwrap() {
            let now = rig.ends[A].now().mono;
            rig.wait(at.since(now));
        }
    }
    assert!(rig.ends[A].count("udp_sent") > sent);
}

#[test]
//@test C-TMR-12
fn link_that_is_down_sends_nothing_and_up_again_works() {
    let mut rig = Rig::connected();
    rig.ends[A].set_link(false).unwrap();
    assert_eq!(rig.ends[A].worker.udp().port(), None);
    let sent = rig.ends[A].count("udp_sent");
    rig.ends[A].give(&packet(A, B, b"into the void"));
    rig.ends[B].give(&packet(B, A, b"to nobody"));
    rig.settle();
    assert_eq!((rig.ends[A].count("udp_sent"), rig.ends[A].taken().len()), (sent, 0));
    rig.ends[A].set_link(true).unwrap();
    rig.wait(Duration::from_secs(6));
    rig.ends[A].give(&packet(A, B, b"back"));
    rig.settle();
    assert!(rig.ends[B].taken().contains(&packet(A, B, b"back")));
}

#[test]
fn port_that_cannot_be_had_leaves_everything_as_it_was() {
    let mut rig = Rig::connected();
    let before = rig.ends[A].worker.snapshot();
    rig.ends[A].worker.udp().faults.fail_open(1, libc::EADDRINUSE);
    let change = DeviceUpdate {
        private_key: Some(None),
        listen_port: Some(7),
        fwmark: Some(9),
        replace_peers: true,
        peers: Vec::new(),
    };
    let error = rig.ends[A].configure(&change).unwrap_err();
    assert!(matches!(error, ConfigureError::Bind { port: 7, .. }), "{error}");
    let after = rig.ends[A].worker.snapshot();
    assert_eq!((after.listen_port, after.fwmark, after.peers.len()), (before.listen_port, 0, 1));
    assert!(after.private_key == before.private_key);
    rig.ends[A].worker.udp().faults.fail_open(1, libc::EPERM);
    let error = rig.ends[A].configure(&change).unwrap_err();
    assert!(matches!(error, ConfigureError::Mark { fwmark: 9, .. }), "{error}");

    rig.ends[A].give(&packet(A, B, b"still here"));
    rig.settle();
    assert_eq!(rig.ends[B].taken(), [packet(A, B, b"still here")]);
}

#[test]
fn sockets_that_cannot_be_opened_keep_the_tunnel_down_until_they_can() {
    let mut rig = Rig::new();
    rig.ends[A].set_link(false).unwrap();
    rig.ends[A].worker.udp().faults.fail_open(1, libc::EADDRINUSE);
    assert!(matches!(rig.ends[A].set_link(true), Err(ConfigureError::Bind { port: 51820, .. })));
    rig.ends[A].give(&packet(A, B, b"early"));
    rig.settle();
    assert_eq!((rig.ends[A].count("down"), rig.ends[A].count("udp_sent")), (1, 0));
    rig.ends[A].set_link(true).unwrap();
    rig.ends[A].give(&packet(A, B, b"now"));
    rig.settle();
    assert_eq!(rig.ends[B].taken(), [packet(A, B, b"now")]);
}

#[test]
fn port_is_kept_while_the_link_is_down() {
    let mut rig = Rig::new();
    let chosen = rig.ends[A].worker.snapshot().listen_port;
    assert_eq!(chosen, outer(A).port());
    rig.ends[A].set_link(false).unwrap();
    assert_eq!(rig.ends[A].worker.snapshot().listen_port, chosen);
    let change = DeviceUpdate { listen_port: Some(4000), fwmark: Some(1), ..Default::default() };
    rig.ends[A].configure(&change).unwrap();
    assert_eq!(rig.ends[A].worker.udp().port(), None);
    rig.ends[A].set_link(true).unwrap();
    assert_eq!(rig.ends[A].worker.udp().port(), Some(4000));
    let snapshot = rig.ends[A].worker.snapshot();
    assert_eq!((snapshot.listen_port, snapshot.fwmark), (4000, 1));
}

#[test]
//@test C-OUT-7
fn lost_source_is_forgotten_by_the_peer_that_used_it() {
    let mut rig = Rig::connected();
    rig.ends[B].give(&packet(B, A, b"x"));
    rig.settle();
    let local = LocalAddr { ip: outer(B).ip(), ifindex: 0 };
    let used = Endpoint { local: Some(local), ..Endpoint::new(outer(A)) };
    assert_eq!(rig.ends[B].worker.udp().last_to(), Some(used));
    rig.ends[B].worker.udp().lose_source(used);
    rig.settle();
    rig.ends[B].give(&packet(B, A, b"y"));
    rig.settle();
    assert_eq!(rig.ends[B].worker.udp().last_to(), Some(Endpoint::new(outer(A))));
}

#[test]
fn deleted_interface_ends_the_worker_whichever_call_finds_out() {
    let mut rig = Rig::connected();
    rig.ends[A].worker.tun().faults.fail_recv(1, libc::EBADFD);
    assert!(matches!(rig.ends[A].worker.turn(), Err(Fatal::TunGone)));
    rig.ends[A].give(&packet(A, B, b"x"));
    rig.ends[A].worker.turn().unwrap();
    rig.ends[B].worker.tun().faults.fail_send(1, libc::EBADFD);
    assert!(matches!(rig.ends[B].worker.turn(), Err(Fatal::TunGone)));
    rig.ends[B].worker.tun().faults.fail_recv(1, libc::EBADFD);
    assert!(matches!(rig.ends[B].worker.run(), Err(Fatal::TunGone)));
    assert_eq!(rig.ends[B].handle.snapshot().unwrap_err(), Gone);
    assert!(matches!(rig.ends[B].handle.set_link(true, MTU), Err(ConfigureError::Gone)));
}

#[test]
fn events_come_out_with_the_peer_they_are_about() {
    let mut rig = Rig::new();
    let events = rig.ends[A].worker.events();
    rig.ends[A].give(&packet(A, B, b"x"));
    rig.settle();
    let (event, peer) = events.try_recv().unwrap();
    assert!(matches!(event, Event::SessionEstablished(_)), "{event:?}");
    assert_eq!(peer, Some(key(B).public_key()));
}

#[test]
fn a_joined_write_that_is_refused_costs_nothing_and_is_told_once() {
    let mut rig = Rig::connected();
    let events = rig.ends[B].worker.events();
    rig.ends[B].worker.delivery.set_merging(true);
    assert!(rig.ends[B].worker.status().merging);
    rig.ends[B].worker.tun().faults.fail_send(1, libc::EINVAL);
    let packets: Vec<_> = (0..6).map(|i| segment(1, i * 1000, &[7; 1000])).collect();
    packets.iter().for_each(|p| rig.ends[A].give(p));
    rig.settle();
    assert_eq!(rig.ends[B].taken(), packets);
    let given_up: Vec<_> = events.try_iter().filter(|(_, peer)| peer.is_none()).collect();
    assert_eq!(given_up, [(Event::OffloadGivenUp(GivenUp::JoinedWrites { errno: libc::EINVAL }), None)]);
    assert!(!rig.ends[B].worker.status().merging);
    assert_eq!(rig.ends[B].count("tun_merge_fallbacks"), 1);
}

#[test]
fn two_workers_on_threads_serve_commands_and_packets_over_real_sockets() {
    let make = |host| {
        let (inside, machine) = tun_pair(1024);
        let device = Device::new(DeviceConfig::default(), Box::new(OsEntropy));
        let (mut worker, handle) = Worker::new(device, inside, Udp::new(), BootClock::default()).unwrap();
        let thread = std::thread::spawn(move || worker.run());
        handle
            .configure(DeviceUpdate { listen_port: Some(0), ..update(host, peer(1 - host, None)) })
            .unwrap();
        handle.set_link(true, MTU).unwrap();
        (machine, handle, thread)
    };
    let (mut machine_a, a, thread_a) = make(A);
    let (mut machine_b, b, thread_b) = make(B);
    let port = b.snapshot().unwrap().listen_port;
    let towards = SocketAddr::from(([127, 0, 0, 1], port));
    let change = DeviceUpdate { peers: vec![peer(B, Some(towards))], ..Default::default() };
    a.configure(change).unwrap();

    // Ping and pong, so that both sides park between any two packets; a lost wake-up would stall it.
    let mut buf = vec![0; 65_536];
    let mut wait = |machine: &mut MemTun| {
        let mut poller = Poller::new().unwrap();
        machine.attach(&poller).unwrap();
        let mut clock = BootClock::default();
        for _ in 0..100 {
            if let Ok((len, _)) = machine.recv(&mut buf) {
                return buf[..len].to_vec();
            }
            let now = clock.now().mono;
            poller.park(now, Some(now.after(Duration::from_millis(100)))).unwrap();
        }
        panic!("no packet within 10 s");
    };
    for i in 0..500_u16 {
        let (ping, pong) = (packet(A, B, &i.to_be_bytes()), packet(B, A, &i.to_be_bytes()));
        machine_a.send(&VnetHdr::default(), &[IoSlice::new(&ping)]).unwrap();
        assert_eq!(wait(&mut machine_b), ping);
        machine_b.send(&VnetHdr::default(), &[IoSlice::new(&pong)]).unwrap();
        assert_eq!(wait(&mut machine_a), pong);
    }
    assert_eq!(a.counters().unwrap().get("tun_read"), Some(500));
    assert_eq!(b.snapshot().unwrap().peers[0].endpoint.unwrap().ip(), towards.ip());

    let other = Udp::new().open(port, 0).unwrap_err();
    assert_eq!(other.kind(), io::ErrorKind::AddrInUse);
    let taken = a.configure(DeviceUpdate { listen_port: Some(port), ..Default::default() }).unwrap_err();
    assert!(taken.to_string().contains("in use by another program"), "{taken}");

    for (handle, thread) in [(a, thread_a), (b, thread_b)] {
        handle.stop();
        assert!(thread.join().unwrap().is_ok());
        assert_eq!(handle.counters().unwrap_err(), Gone);
    }
}
