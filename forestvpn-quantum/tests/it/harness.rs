//! Devices joined by a link that a test controls, on a clock that a test winds, with a log of the wire.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use forestvpn_quantum::batch::{Ecn, Endpoint, Envelope, Frame, LocalAddr, Outbox, Received, Span};
use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerSnapshot, PeerUpdate};
use forestvpn_quantum::offload::VnetHdr;
use forestvpn_quantum::time::{Entropy, Instant, Now};
use forestvpn_quantum::{Device, DeviceConfig, Discard, Event, PeerId, PrivateKey, PublicKey};

/// Wall clock at virtual time zero.
pub const EPOCH: Duration = Duration::from_secs(1_700_000_000);
/// Virtual time zero; not the origin, so that ages can be subtracted.
pub const START: Duration = Duration::from_secs(1_000);

pub fn secs(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// Predictable randomness (splitmix64).
pub struct Seeded(pub u64);

impl Seeded {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Entropy for Seeded {
    fn fill(&mut self, out: &mut [u8]) {
        out.chunks_mut(8).for_each(|c| c.copy_from_slice(&self.next().to_le_bytes()[..c.len()]));
    }
}

/// Collects datagrams.
#[derive(Default)]
pub struct Collect {
    pub sent: Vec<(Envelope, Vec<u8>)>,
    open: Option<(Envelope, usize, Vec<u8>)>,
    /// Reservations refused from now on when set.
    pub full: bool,
}

impl Collect {
    /// One without room.
    pub fn full() -> Self {
        Self { full: true, ..Self::default() }
    }
}

impl Outbox for Collect {
    fn reserve(&mut self, envelope: &Envelope, stride: usize, count: usize) -> Option<&mut [u8]> {
        if self.full {
            return None;
        }
        self.open = Some((*envelope, stride, vec![0xaa; stride * count]));
        self.open.as_mut().map(|o| &mut o.2[..])
    }
    fn commit(&mut self, len: usize) {
        let (envelope, stride, bytes) = self.open.take().unwrap();
        bytes[..len].chunks(stride).for_each(|d| self.sent.push((envelope, d.to_vec())));
    }
}

/// One datagram on the wire.
#[derive(Clone, Debug)]
pub struct Sent {
    pub at: Duration,
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub ecn: Ecn,
    /// Whose count it is on.
    pub peer: Option<PeerId>,
    pub tos: u8,
    pub hops: Option<u8>,
    /// The local address it was sent from, when the device asked for one.
    pub local: Option<LocalAddr>,
    pub bytes: Vec<u8>,
}

impl Sent {
    /// Message type: 1 initiation, 2 response, 3 cookie reply, 4 data.
    pub fn kind(&self) -> u8 {
        self.bytes[0]
    }
    pub fn is_keepalive(&self) -> bool {
        self.kind() == 4 && self.bytes.len() == 32
    }
    pub fn is_data(&self) -> bool {
        self.kind() == 4 && self.bytes.len() > 32
    }
    /// Sender index of initiation and response, receiver index of cookie reply and data.
    pub fn index(&self) -> u32 {
        u32::from_le_bytes(self.bytes[4..8].try_into().unwrap())
    }
    pub fn counter(&self) -> u64 {
        u64::from_le_bytes(self.bytes[8..16].try_into().unwrap())
    }
}

/// One end.
pub struct Host {
    pub device: Device,
    pub key: PrivateKey,
    pub addr: SocketAddr,
    /// Inner packets that came out, with their time.
    pub delivered: Vec<(Duration, Vec<u8>)>,
}

impl Host {
    pub fn public(&self) -> PublicKey {
        self.key.public_key()
    }
    pub fn discarded(&self, why: Discard) -> u64 {
        self.device.discards()[why as usize]
    }
    pub fn peer(&self, key: &PublicKey) -> PeerSnapshot {
        self.device.snapshot().peers.into_iter().find(|p| p.public_key == *key).unwrap()
    }
    pub fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.device.poll_event()).collect()
    }
}

type Filter = Box<dyn FnMut(&Sent) -> Fate>;

/// What the link does with a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    Drop,
    Delay(Duration),
    Twice,
}

/// Hosts, a link and a clock.
pub struct World {
    pub t: Duration,
    pub hosts: Vec<Host>,
    pub log: Vec<Sent>,
    flying: VecDeque<(Duration, Sent)>,
    pub filter: Filter,
    /// Wall clock minus virtual time; a test may step it.
    pub unix: Duration,
    /// Seed of the next device; every one is different.
    pub seed: u64,
    config: DeviceConfig,
}

pub const A: usize = 0;
pub const B: usize = 1;

/// Inner address of a host.
pub fn inner(host: usize) -> [u8; 4] {
    [10, 0, 0, host as u8 + 1]
}

/// The inner address of a host as an allowed IP.
pub fn allowed(host: usize) -> AllowedIp {
    let [a, b, c, d] = inner(host);
    AllowedIp { net: format!("{a}.{b}.{c}.{d}/32").parse().unwrap(), remove: false }
}

impl World {
    /// `count` hosts with keys, up, without peers.
    pub fn new(count: usize) -> Self {
        Self::bounded(count, DeviceConfig::default())
    }

    /// The same with other bounds.
    pub fn bounded(count: usize, config: DeviceConfig) -> Self {
        let mut world = Self {
            t: Duration::ZERO,
            hosts: Vec::new(),
            log: Vec::new(),
            flying: VecDeque::new(),
            filter: Box::new(|_| Fate::Pass),
            unix: EPOCH,
            config,
            seed: 7,
        };
        for i in 0..count {
            let key = PrivateKey::new([i as u8 + 1; 32]);
            let device = world.device(&key);
            let addr = format!("192.0.2.{}:{}", i + 1, 51820 + i).parse().unwrap();
            world.hosts.push(Host { device, key, addr, delivered: Vec::new() });
        }
        world
    }

    /// A device with `key`, up, without peers.
    fn device(&mut self, key: &PrivateKey) -> Device {
        let mut device = Device::new(self.config, Box::new(Seeded(self.seed)));
        self.seed += 1;
        let update = DeviceUpdate { private_key: Some(Some(key.clone())), ..Default::default() };
        device.configure(&update, self.now(), &mut Collect::default()).unwrap();
        device.set_up(true, self.now(), &mut Collect::default());
        device
    }

    /// The process at `host` ends and a new one starts, with the same key and `of` as its peer.
    pub fn restart(&mut self, host: usize, of: usize) {
        let key = self.hosts[host].key.clone();
        self.hosts[host].device = self.device(&key);
        self.introduce(host, of, true);
    }

    /// The same, and the new process has another configuration.
    pub fn restart_with(&mut self, host: usize, of: usize, config: DeviceConfig) {
        let before = std::mem::replace(&mut self.config, config);
        self.restart(host, of);
        self.config = before;
    }

    /// A valid initiation from the owner of `host`'s key to `of`, dated now; `host` knows nothing of it.
    pub fn initiation(&mut self, host: usize, of: usize) -> Vec<u8> {
        let mut device = self.device(&self.hosts[host].key.clone());
        let mut peer = PeerUpdate::new(self.hosts[of].public());
        peer.endpoint = Some(self.hosts[of].addr);
        peer.persistent_keepalive = Some(1);
        let mut out = Collect::default();
        let update = DeviceUpdate { peers: vec![peer], ..Default::default() };
        device.configure(&update, self.now(), &mut out).unwrap();
        out.sent.remove(0).1
    }

    /// Two hosts that are each other's peer; both know where the other is.
    pub fn pair() -> Self {
        let mut world = Self::new(2);
        world.introduce(A, B, true);
        world.introduce(B, A, true);
        world
    }

    /// Makes `of` a peer of `host`, with its inner /32 as allowed IP.
    pub fn introduce(&mut self, host: usize, of: usize, endpoint: bool) {
        let mut peer = PeerUpdate::new(self.hosts[of].public());
        peer.endpoint = endpoint.then_some(self.hosts[of].addr);
        peer.allowed_ips = vec![allowed(of)];
        self.configure(host, DeviceUpdate { peers: vec![peer], ..Default::default() });
    }

    /// Changes the peer `of` at `host`.
    pub fn update_peer(&mut self, host: usize, of: usize, change: impl FnOnce(&mut PeerUpdate)) {
        let mut peer = PeerUpdate::new(self.hosts[of].public());
        change(&mut peer);
        self.configure(host, DeviceUpdate { peers: vec![peer], ..Default::default() });
    }

    pub fn configure(&mut self, host: usize, update: DeviceUpdate) {
        self.with(host, |device, now, out| device.configure(&update, now, out).unwrap());
    }

    pub fn now(&self) -> Now {
        let mono = Instant::ZERO.after(START + self.t);
        Now { mono, unix: self.unix + self.t }
    }

    /// Runs `f` on a device and puts what it sends on the wire.
    pub fn with<R>(&mut self, host: usize, f: impl FnOnce(&mut Device, Now, &mut Collect) -> R) -> R {
        let mut out = Collect::default();
        let now = self.now();
        let result = f(&mut self.hosts[host].device, now, &mut out);
        self.transmit(host, out);
        result
    }

    fn transmit(&mut self, host: usize, out: Collect) {
        let from = self.hosts[host].addr;
        for (Envelope { to, peer, tos, hops }, bytes) in out.sent {
            let ecn = Ecn::from_bits(tos);
            let sent = Sent { at: self.t, from, to: to.remote, peer, ecn, tos, hops, local: to.local, bytes };
            self.log.push(sent.clone());
            match (self.filter)(&sent) {
                Fate::Pass => self.flying.push_back((self.t, sent)),
                Fate::Delay(by) => self.flying.push_back((self.t + by, sent)),
                Fate::Twice => {
                    self.flying.push_back((self.t, sent.clone()));
                    self.flying.push_back((self.t, sent));
                }
                Fate::Drop => {}
            }
        }
    }

    /// Hands a packet from the TUN of `host` to its device.
    pub fn send(&mut self, host: usize, packet: &[u8]) -> Result<usize, Discard> {
        let mut bytes = packet.to_vec();
        self.with(host, |d, now, out| {
            d.outbound(now, Frame { hdr: VnetHdr::default(), bytes: &mut bytes }, out)
        })
    }

    /// A datagram arrives at `host`, as if from `from`, and queued handshakes are worked off.
    pub fn inject(&mut self, host: usize, from: SocketAddr, bytes: &[u8]) {
        self.inject_ecn(host, from, bytes, Ecn::NotEct);
    }

    pub fn inject_ecn(&mut self, host: usize, from: SocketAddr, bytes: &[u8], ecn: Ecn) {
        self.arrive(host, Endpoint::new(from), bytes, ecn);
        self.due(host);
    }

    /// A datagram arrives; handshakes stay queued until `due` or `settle`.
    pub fn arrive(&mut self, host: usize, from: Endpoint, bytes: &[u8], ecn: Ecn) {
        let mut bytes = bytes.to_vec();
        let mut plain: Vec<Span> = Vec::new();
        let stride = bytes.len().max(1);
        self.with(host, |d, now, out| {
            let rx = Received { bytes: &mut bytes, stride, from, ecn };
            d.inbound(now, rx, &mut plain, out);
        });
        let t = self.t;
        for span in plain {
            let at = span.at as usize;
            let packet = bytes[at..at + span.len as usize].to_vec();
            self.hosts[host].delivered.push((t, packet));
        }
    }

    /// Calls `handle_timeout` while it is due; fails when that never ends.
    pub fn due(&mut self, host: usize) {
        for _ in 0..1_000_000 {
            let now = self.now();
            if self.hosts[host].device.poll_timeout().is_none_or(|at| at > now.mono) {
                return;
            }
            self.with(host, |d, now, out| d.handle_timeout(now, out));
        }
        panic!("host {host} stays due at {:?}", self.t);
    }

    /// `sent` arrives where it was sent to, whatever became of it on the link.
    pub fn deliver(&mut self, sent: &Sent) {
        let host = self.hosts.iter().position(|h| h.addr == sent.to).unwrap();
        self.inject_ecn(host, sent.from, &sent.bytes, sent.ecn);
    }

    /// From now on the link loses everything.
    pub fn cut(&mut self) {
        self.filter = Box::new(|_| Fate::Drop);
    }

    /// From now on the link loses nothing.
    pub fn heal(&mut self) {
        self.filter = Box::new(|_| Fate::Pass);
    }

    /// Delivers what is due on the wire to one host, working off its handshakes only if `serve`.
    pub fn fly(&mut self, host: usize, serve: bool) {
        let addr = self.hosts[host].addr;
        while let Some(at) = self.flying.iter().position(|(at, s)| *at <= self.t && s.to == addr) {
            let (_, sent) = self.flying.remove(at).unwrap();
            self.arrive(host, Endpoint::new(sent.from), &sent.bytes, sent.ecn);
            if serve {
                self.due(host);
            }
        }
    }

    /// Delivers everything that is due now on the wire, and what that causes.
    pub fn settle(&mut self) {
        for host in 0..self.hosts.len() {
            self.due(host);
        }
        while let Some(at) = self.flying.iter().position(|(at, _)| *at <= self.t) {
            let (_, sent) = self.flying.remove(at).unwrap();
            if let Some(host) = self.hosts.iter().position(|h| h.addr == sent.to) {
                self.inject_ecn(host, sent.from, &sent.bytes, sent.ecn);
            }
        }
    }

    /// The next moment at which anything happens.
    pub fn next(&self) -> Option<Duration> {
        let deadlines = self.hosts.iter().filter_map(|h| h.device.poll_timeout());
        let deadlines = deadlines.map(|at| Self::virtual_time(at).max(self.t));
        deadlines.chain(self.flying.iter().map(|(at, _)| *at)).min()
    }

    /// Runs the world until `t`, from deadline to deadline.
    pub fn run_until(&mut self, t: Duration) {
        self.settle();
        while let Some(next) = self.next().filter(|next| *next <= t) {
            self.t = self.t.max(next);
            self.settle();
        }
        self.t = self.t.max(t);
        self.settle();
    }

    pub fn run_for(&mut self, by: Duration) {
        self.run_until(self.t + by);
    }

    /// Loses everything that is on the wire.
    pub fn drop_flying(&mut self) {
        self.flying.clear();
    }

    /// A deadline of a device as virtual time.
    pub fn virtual_time(at: Instant) -> Duration {
        Duration::from_nanos(at.as_nanos()).saturating_sub(START)
    }

    /// Jumps without serving deadlines on the way (suspend).
    pub fn jump(&mut self, by: Duration) {
        self.t += by;
    }

    /// A handshake from `a` to `b`, caused by one data packet, which arrives.
    pub fn connect(&mut self, a: usize, b: usize) {
        let before = self.hosts[b].delivered.len();
        self.send(a, &packet(a, b, b"connect")).unwrap();
        self.settle();
        assert_eq!(self.hosts[b].delivered.len(), before + 1, "the tunnel carries a packet");
    }

    /// Everything that `host` sent.
    pub fn sent_by(&self, host: usize) -> Vec<Sent> {
        self.log.iter().filter(|s| s.from == self.hosts[host].addr).cloned().collect()
    }

    /// Everything of message type `kind` that `host` sent.
    pub fn kind_by(&self, host: usize, kind: u8) -> Vec<Sent> {
        self.sent_by(host).into_iter().filter(|s| s.kind() == kind).collect()
    }

    /// The latest datagram of message type `kind` that `host` sent.
    pub fn last(&self, host: usize, kind: u8) -> Sent {
        self.kind_by(host, kind).pop().unwrap()
    }

    /// Empty data messages that `host` sent.
    pub fn keepalives_by(&self, host: usize) -> Vec<Sent> {
        self.sent_by(host).into_iter().filter(Sent::is_keepalive).collect()
    }

    /// What `host` refused for the reason `why`.
    pub fn discarded(&self, host: usize, why: Discard) -> u64 {
        self.hosts[host].discarded(why)
    }

    /// What `host` shows of its peer `of`.
    pub fn peer(&self, host: usize, of: usize) -> PeerSnapshot {
        self.hosts[host].peer(&self.hosts[of].public())
    }

    /// Payloads delivered at `host`, by time.
    pub fn payloads(&self, host: usize) -> Vec<Vec<u8>> {
        self.hosts[host].delivered.iter().map(|(_, p)| p[28..].to_vec()).collect()
    }
}

/// An IPv4/UDP packet from `a` to `b` with `payload` (checksums are nobody's business here).
pub fn packet(a: usize, b: usize, payload: &[u8]) -> Vec<u8> {
    let mut p = vec![0x45, 0];
    p.extend(((28 + payload.len()) as u16).to_be_bytes());
    p.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    p.extend(inner(a));
    p.extend(inner(b));
    p.extend([0x13, 0x88, 0x13, 0x89]);
    p.extend(((8 + payload.len()) as u16).to_be_bytes());
    p.extend([0, 0]);
    p.extend(payload);
    p
}

/// Inner IPv6 address of a host.
pub fn inner6(host: usize) -> [u8; 16] {
    let mut ip = [0; 16];
    (ip[0], ip[15]) = (0xfd, host as u8 + 1);
    ip
}

/// An IPv6 packet without a known upper layer from `a` to `b`: 40 bytes and `payload`.
pub fn packet6(a: usize, b: usize, payload: &[u8]) -> Vec<u8> {
    let mut p = vec![0x60, 0, 0, 0];
    p.extend((payload.len() as u16).to_be_bytes());
    p.extend([59, 64]);
    p.extend(inner6(a));
    p.extend(inner6(b));
    p.extend(payload);
    p
}

/// Lets `of` use its inner IPv6 address at `host` too.
pub fn allow6(w: &mut World, host: usize, of: usize) {
    allow(w, host, of, &format!("fd00::{:x}/128", of + 1));
}

/// Adds `net` to the allowed IPs of `of` at `host`.
pub fn allow(w: &mut World, host: usize, of: usize, net: &str) {
    let net = net.parse().unwrap();
    w.update_peer(host, of, |p| p.allowed_ips = vec![AllowedIp { net, remove: false }]);
}
