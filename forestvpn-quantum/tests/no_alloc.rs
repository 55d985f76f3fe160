//! What the packet path and idle peers take from the heap, counted by an allocator that counts.

#![allow(missing_docs, clippy::unwrap_used)]

use std::net::SocketAddr;
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use forestvpn_quantum::batch::{Ecn, Endpoint, Envelope, Frame, Outbox, Received, Span};
use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerUpdate};
use forestvpn_quantum::offload::VnetHdr;
use forestvpn_quantum::time::{Entropy, Instant, Now};
use forestvpn_quantum::{Device, DeviceConfig, Discard, PrivateKey, PublicKey};

/// Splitmix64: every run is the same.
struct Seeded(u64);

impl Entropy for Seeded {
    fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            chunk.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..chunk.len()]);
        }
    }
}

/// An outbox as the worker has one: memory taken once.
struct Arena {
    bytes: Vec<u8>,
    used: usize,
    stride: usize,
    sent: Vec<(usize, usize)>,
}

impl Arena {
    fn new() -> Self {
        Self { bytes: vec![0; 1 << 17], used: 0, stride: 1, sent: Vec::with_capacity(256) }
    }

    fn clear(&mut self) {
        self.used = 0;
        self.sent.clear();
    }
}

impl Outbox for Arena {
    fn reserve(&mut self, _: &Envelope, stride: usize, count: usize) -> Option<&mut [u8]> {
        if self.sent.len() == self.sent.capacity() {
            return None;
        }
        self.stride = stride;
        self.bytes.get_mut(self.used..self.used + stride * count)
    }

    fn commit(&mut self, len: usize) {
        self.sent.push((self.used, len));
        self.used += len;
    }
}

const START: u64 = 1_000_000_000_000;

fn at(ns: u64) -> Now {
    Now {
        mono: Instant::from_nanos(START + ns),
        unix: Duration::from_secs(1_700_000_000) + Duration::from_nanos(ns),
    }
}

fn address(n: u32) -> SocketAddr {
    let [_, a, b, c] = n.to_be_bytes();
    SocketAddr::from(([198, a, b, c], 51820))
}

fn inner(n: u32) -> [u8; 4] {
    let [_, a, b, c] = n.to_be_bytes();
    [10, a, b, c]
}

fn key(n: u32) -> PrivateKey {
    let mut bytes = [7; 32];
    bytes[8..12].copy_from_slice(&n.to_be_bytes());
    PrivateKey::new(bytes)
}

fn peer(n: u32, name: PublicKey) -> PeerUpdate {
    let mut peer = PeerUpdate::new(name);
    peer.endpoint = Some(address(n));
    let [a, b, c, d] = inner(n);
    peer.allowed_ips = vec![AllowedIp { net: format!("{a}.{b}.{c}.{d}/32").parse().unwrap(), remove: false }];
    peer
}

fn device(n: u32) -> Device {
    let mut device = Device::new(DeviceConfig::default(), Box::new(Seeded(n.into())));
    let update = DeviceUpdate { private_key: Some(Some(key(n))), ..Default::default() };
    device.configure(&update, at(0), &mut Arena::new()).unwrap();
    device.set_up(true, at(0), &mut Arena::new());
    device
}

fn packet(from: u32, to: u32, len: usize) -> Vec<u8> {
    let mut p = vec![0; len];
    p[0] = 0x45;
    p[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    p[12..16].copy_from_slice(&inner(from));
    p[16..20].copy_from_slice(&inner(to));
    p
}

/// One end and the memory its loop works in, taken once.
struct End {
    n: u32,
    device: Device,
    out: Arena,
    rx: Vec<u8>,
    plain: Vec<Span>,
}

impl End {
    fn new(n: u32) -> Self {
        Self {
            n,
            device: device(n),
            out: Arena::new(),
            rx: Vec::with_capacity(1 << 16),
            plain: Vec::with_capacity(64),
        }
    }

    fn send(&mut self, now: Now, packet: &mut [u8]) {
        let frame = Frame { hdr: VnetHdr::default(), bytes: packet };
        self.device.outbound(now, frame, &mut self.out).unwrap();
    }

    fn receive(&mut self, now: Now, from: u32, bytes: &[u8]) {
        self.rx.clear();
        self.rx.extend_from_slice(bytes);
        let stride = bytes.len().max(1);
        let rx =
            Received { bytes: &mut self.rx, stride, from: Endpoint::new(address(from)), ecn: Ecn::NotEct };
        self.device.inbound(now, rx, &mut self.plain, &mut self.out);
    }

    fn due(&mut self, now: Now) {
        while self.device.poll_timeout().is_some_and(|t| t <= now.mono) {
            self.device.handle_timeout(now, &mut self.out);
        }
    }
}

/// Carries everything between two ends until both are quiet. Gives how many packets were delivered.
fn exchange(now: Now, a: &mut End, b: &mut End) -> usize {
    let mut delivered = 0;
    loop {
        a.due(now);
        b.due(now);
        if a.out.sent.is_empty() && b.out.sent.is_empty() {
            return delivered;
        }
        carry(now, a, b);
        carry(now, b, a);
        delivered += a.plain.len() + b.plain.len();
        a.plain.clear();
        b.plain.clear();
    }
}

fn carry(now: Now, from: &mut End, to: &mut End) {
    for i in 0..from.out.sent.len() {
        let (start, len) = from.out.sent[i];
        to.receive(now, from.n, &from.out.bytes[start..start + len]);
    }
    from.out.clear();
}

fn pair() -> (End, End) {
    let (mut a, mut b) = (End::new(1), End::new(2));
    let (of_a, of_b) = (key(1).public_key(), key(2).public_key());
    let update = DeviceUpdate { peers: vec![peer(2, of_b)], ..Default::default() };
    a.device.configure(&update, at(0), &mut a.out).unwrap();
    let update = DeviceUpdate { peers: vec![peer(1, of_a)], ..Default::default() };
    b.device.configure(&update, at(0), &mut b.out).unwrap();
    a.send(at(0), &mut packet(1, 2, 100));
    assert_eq!(exchange(at(0), &mut a, &mut b), 1);
    (a, b)
}

#[test]
fn ten_thousand_packets_each_way_take_nothing_from_the_heap() {
    let (mut a, mut b) = pair();
    let (mut there, mut back) = (packet(1, 2, 1400), packet(2, 1, 60));
    let mut run = |from: u64, count: u64| {
        let mut delivered = 0;
        for step in from..from + count {
            let now = at(step * 5_000_000);
            a.send(now, &mut there);
            b.send(now, &mut back);
            delivered += exchange(now, &mut a, &mut b);
        }
        delivered
    };
    // The first packets make the queues as large as they will be.
    run(1, 100);
    let mut delivered = 0;
    // 50 s: passive keepalives are armed and cancelled, deadlines fire, no handshake is due.
    let info = measure(|| delivered = run(101, 10_000));
    assert_eq!(delivered, 20_000);
    assert_eq!(info.count_total, 0, "{info:?}");
}

#[test]
fn malformed_packets_from_strangers_take_nothing_from_the_heap() {
    let (mut a, mut b) = pair();
    let now = at(1_000_000_000);
    a.send(now, &mut packet(1, 2, 100));
    let data = a.out.bytes[..a.out.used].to_vec();
    a.out.clear();
    // Right in form, wrong in mac1.
    let mut initiation = [0; 148];
    initiation[0] = 1;
    let mut response = [0; 92];
    response[0] = 2;
    let mut cookie = [0; 64];
    cookie[0] = 3;
    let mut forged = data.clone();
    *forged.last_mut().unwrap() ^= 1;
    let mut elsewhere = data.clone();
    elsewhere[4] ^= 1;
    let huge = {
        let mut huge = vec![0; 65_507];
        huge[0] = 4;
        huge
    };
    b.receive(now, 1, &data);
    b.plain.clear();
    let kinds: [&[u8]; 10] =
        [&[], &[4], &[9; 40], &[1; 148], &initiation, &response, &cookie, &forged, &elsewhere, &data];
    for kind in kinds {
        b.receive(now, 3, kind);
    }
    b.receive(now, 3, &huge);
    let before: u64 = b.device.discards().iter().sum();
    let info = measure(|| {
        for n in 0..1_000 {
            for kind in kinds {
                b.receive(now, n, kind);
            }
            b.receive(now, n, &huge);
        }
    });
    let after: u64 = b.device.discards().iter().sum();
    assert_eq!(after - before, 10_000, "all of them counted, but the empty one");
    assert_eq!(info.count_total, 0, "{info:?}");
    assert!(b.plain.is_empty() && b.out.sent.is_empty());
}

const PEERS: u32 = 10_000;

fn ten_thousand(keepalive: Option<u16>, endpoint: bool) -> DeviceUpdate {
    // Any 32 bytes name a peer; X25519 of 10 000 private keys would only take time.
    let peers = (0..PEERS).map(|n| {
        let mut name = [9; 32];
        name[..4].copy_from_slice(&n.to_le_bytes());
        let mut update = peer(n, PublicKey(name));
        update.persistent_keepalive = keepalive;
        update.endpoint = update.endpoint.filter(|_| endpoint);
        update
    });
    DeviceUpdate { peers: peers.collect(), ..Default::default() }
}

fn per_peer(info: &AllocationInfo) -> (f64, f64) {
    (info.bytes_current as f64 / f64::from(PEERS), info.count_current as f64 / f64::from(PEERS))
}

#[test]
fn ten_thousand_idle_peers_take_little_memory_and_give_it_back() {
    let mut device = device(1);
    let update = ten_thousand(None, true);
    let mut out = Arena::new();
    let all = measure(|| {
        let info = measure(|| device.configure(&update, at(0), &mut out).unwrap());
        let (bytes, pieces) = per_peer(&info);
        println!("idle peer with endpoint and one /32: {bytes:.0} bytes in {pieces:.2} allocations");
        assert!(bytes < 1_500.0, "{bytes} bytes per idle peer");
        assert_eq!(device.poll_timeout(), None, "idle peers have no deadline");
        let info = measure(|| drop(device.snapshot()));
        println!("snapshot: {:.2} allocations per peer", info.count_total as f64 / f64::from(PEERS));
        assert!(info.count_total < u64::from(PEERS) * 4);
        assert_eq!(info.bytes_current, 0);
        let clear = DeviceUpdate { replace_peers: true, ..Default::default() };
        device.configure(&clear, at(0), &mut out).unwrap();
    });
    println!("left after removal: {} bytes", all.bytes_current);
    assert!(all.bytes_current < i64::from(PEERS) * 64, "tables keep some room, peers nothing");
}

#[test]
fn a_peer_with_a_session_takes_a_few_kilobytes() {
    let (mut a, mut b) = (End::new(1), End::new(2));
    let (of_a, of_b) = (key(1).public_key(), key(2).public_key());
    a.device
        .configure(&DeviceUpdate { peers: vec![peer(2, of_b)], ..Default::default() }, at(0), &mut a.out)
        .unwrap();
    b.device
        .configure(&DeviceUpdate { peers: vec![peer(1, of_a)], ..Default::default() }, at(0), &mut b.out)
        .unwrap();
    let info = measure(|| {
        a.send(at(0), &mut packet(1, 2, 100));
        exchange(at(0), &mut a, &mut b);
    });
    println!("one session, both ends: {} bytes in {} allocations", info.bytes_current, info.count_current);
    assert!(info.bytes_current < 2 * 8_192);
}

#[test]
fn keepalives_of_ten_thousand_peers_cost_a_few_calls_and_no_memory() {
    let mut device = device(1);
    let mut out = Arena::new();
    // Without an endpoint: the timers run, no handshake is calculated.
    device.configure(&ten_thousand(Some(25), false), at(0), &mut out).unwrap();
    let mut now = at(0);
    let mut run = |device: &mut Device, until: u64| {
        let mut calls = 0;
        while let Some(next) = device.poll_timeout().filter(|t| t.as_nanos() <= START + until) {
            now = at(next.as_nanos().max(now.mono.as_nanos()) - START);
            device.handle_timeout(now, &mut out);
            calls += 1;
        }
        calls
    };
    let mut calls = run(&mut device, 24_000_000_000);
    let info = measure(|| calls += run(&mut device, 101_000_000_000));
    let all = u64::from(PEERS).div_ceil(64);
    // Turned on at 0, then at 25, 50, 75 and 100 s.
    assert!(calls <= 5 * all + 5, "{calls} calls for 5 rounds of {PEERS} deadlines");
    assert_eq!(info.count_total, 0, "{info:?}");
}

// F161: failed inbound handshakes leak nothing.
#[test]
fn handshakes_that_are_never_finished_leave_nothing_behind() {
    // 100 000 take two minutes and leave the same 64 bytes.
    const COUNT: u64 = 20_000;
    let (mut a, mut b) = (End::new(1), End::new(2));
    let (of_a, of_b) = (key(1).public_key(), key(2).public_key());
    b.device
        .configure(&DeviceUpdate { peers: vec![peer(1, of_a)], ..Default::default() }, at(0), &mut b.out)
        .unwrap();
    let update = DeviceUpdate { peers: vec![peer(2, of_b)], ..Default::default() };
    a.device.configure(&update, at(0), &mut a.out).unwrap();
    let mut ping = packet(1, 2, 40);
    let mut run = |b: &mut End, from: u64, count: u64| {
        for n in from..from + count {
            // Interface down and up lets the next initiation go after 20 ms instead of 5 s.
            let now = at(n * 20_000_000);
            a.device.set_up(false, now, &mut a.out);
            a.device.set_up(true, now, &mut a.out);
            a.send(now, &mut ping);
            carry(now, &mut a, b);
            b.due(now);
            assert_eq!(b.out.sent.len(), 1, "answered");
            b.out.clear();
        }
    };
    run(&mut b, 1, 100);
    let info = measure(|| run(&mut b, 101, COUNT));
    // Both ends are in the figure.
    println!("after {COUNT} unfinished handshakes: {} bytes more", info.bytes_current);
    assert!(info.bytes_current.abs() < 4_096, "{info:?}");
    assert_eq!(b.device.discards()[Discard::CookieSent as usize], 0);
}
