//! Many peers behind one key: cryptokey routing, sessions and timers, without a socket or a clock.
//!
//! The worker (or an embedder's own loop) hands packets in and takes datagrams out of an [`Outbox`]; a packet
//! goes route -> seal outward, index -> open -> route inward. Everything else here is the cold door:
//! `device/handshakes.rs`, `device/timeouts.rs` and `device/control.rs`.

mod control;
mod handshakes;
mod timeouts;
#[cfg_attr(not(feature = "io"), allow(dead_code, reason = "nobody watches without threads"))]
pub(crate) mod ways;

use core::cmp::Reverse;
use core::net::IpAddr;
use std::collections::{BinaryHeap, VecDeque};

use crate::batch::{Ecn, Endpoint, Envelope, Frame, Outbox, Received, Span};
use crate::crypto::{self, Job, MOST};
use crate::event::{Discard, Event};
use crate::index::Indices;
use crate::ip;
use crate::limiter::Limiter;
use crate::mss::{self, Mss};
use crate::offload::split::Splitter;
use crate::outward;
use crate::peer::Local;
use crate::peers::Peers;
use crate::route::Routes;
use crate::session::{self, datagram_len};
use crate::time::{Entropy, Instant, Now};
use crate::unreachable::{Pace, Unreachable};
use crate::wire::{self, DATA_HEADER, DATA_OVERHEAD, DataHeader, Message};

pub use control::ConfigError;
use handshakes::Waiting;
use ways::Changes;

/// Names a peer of one [`Device`]; never reused for another peer while anyone could still hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub(crate) u32);

impl PeerId {
    pub(crate) const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }
    pub(crate) const fn raw(self) -> u32 {
        self.0
    }
}

/// Bounds of a device. `..Default::default()` works.
#[derive(Clone, Copy, Debug)]
pub struct DeviceConfig {
    /// MTU of the TUN device in bytes: padding never exceeds it (C-OUT-2).
    pub mtu: u16,
    /// Bytes that packets waiting for a handshake may take, over all peers (C-STG-2).
    pub staging_bytes: usize,
    /// Handshake messages that may wait for their turn; an eighth of it means "under load" (C-LOAD-1).
    pub handshake_queue: usize,
    /// Trains of packets go through the cipher together, where the processor has registers wide enough.
    pub train_cipher: bool,
    /// The largest TCP segment that ends on both sides may agree on.
    pub mss: Mss,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self { mtu: 1420, staging_bytes: 64 << 20, handshake_queue: 1024, train_cipher: true, mss: Mss::Off }
    }
}

/// Events kept for an owner that does not poll; older ones are dropped.
const MAX_EVENTS: usize = 1024;

/// Places of the last routes found.
const OUT: usize = 0;
const IN: usize = 1;

/// The multi-peer router.
pub struct Device {
    config: DeviceConfig,
    up: bool,
    local: Option<Local>,
    peers: Peers,
    indices: Indices,
    routes: Routes,
    /// The last route found outward and inward, for bulk traffic; cleared when any route changes.
    recent: [Option<(IpAddr, PeerId)>; 2],
    waiting: VecDeque<Waiting>,
    loaded_until: Instant,
    limiter: Limiter,
    deadlines: BinaryHeap<Reverse<(Instant, PeerId)>>,
    staged_bytes: usize,
    events: VecDeque<Event>,
    discards: [u64; Discard::COUNT],
    pace: Pace,
    changes: Changes,
    entropy: Box<dyn Entropy + Send>,
}

impl core::fmt::Debug for Device {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Device")
            .field("up", &self.up)
            .field("peers", &self.peers.len())
            .finish_non_exhaustive()
    }
}

impl Device {
    /// An empty device: no key, no peers, down.
    pub fn new(config: DeviceConfig, mut entropy: Box<dyn Entropy + Send>) -> Self {
        let mut seed = [0; 16];
        entropy.fill(&mut seed);
        Self {
            config,
            up: false,
            local: None,
            peers: Peers::default(),
            indices: Indices::default(),
            routes: Routes::new(),
            recent: [None; 2],
            waiting: VecDeque::new(),
            loaded_until: Instant::ZERO,
            limiter: Limiter::new(seed),
            deadlines: BinaryHeap::new(),
            staged_bytes: 0,
            events: VecDeque::new(),
            discards: [0; Discard::COUNT],
            pace: Pace::new(),
            changes: Changes::default(),
            entropy,
        }
    }

    /// Which code encrypts data packets here, in words.
    pub fn cipher(&self) -> &'static str {
        crypto::cipher(self.config.train_cipher)
    }

    /// The oldest event that was not polled yet.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// How many packets were not let through, by `Discard as usize`.
    pub const fn discards(&self) -> &[u64; Discard::COUNT] {
        &self.discards
    }

    /// Bytes of packets that wait for a handshake, over all peers.
    pub const fn staged_bytes(&self) -> usize {
        self.staged_bytes
    }

    fn discard(&mut self, why: Discard, count: usize) {
        if let Some(n) = self.discards.get_mut(why as usize) {
            *n = n.saturating_add(count as u64);
        }
    }

    fn event(&mut self, event: Event) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// The peer that `ip` is routed to; `way` is [`OUT`] or [`IN`].
    fn route(&mut self, ip: IpAddr, way: usize) -> Option<PeerId> {
        let recent = self.recent.get_mut(way)?;
        if let Some((known, id)) = *recent
            && known == ip
        {
            return Some(id);
        }
        let id = self.routes.lookup(ip)?;
        *recent = Some((ip, id));
        Some(id)
    }

    // -- outward --------------------------------------------------------------------------------------

    /// One TUN read, a plain packet or a super-packet, becomes datagrams in `out`; gives how many. A packet for a peer without a session waits,
    /// and a handshake is begun (0 datagrams of data then, but an initiation may be in `out`).
    ///
    /// # Errors
    /// Why the packet was not let through; it is counted already.
    #[inline(always)]
    pub fn outbound(&mut self, now: Now, frame: Frame<'_>, out: &mut impl Outbox) -> Result<usize, Discard> {
        let sent = self.outward(now, frame, out);
        if let Err(why) = sent {
            self.discard(why, 1);
        }
        sent
    }

    #[inline(always)]
    fn outward(&mut self, now: Now, mut frame: Frame<'_>, out: &mut impl Outbox) -> Result<usize, Discard> {
        let to = ip::destination(frame.bytes).ok_or(Discard::NotIp)?;
        let id = self.route(to, OUT).ok_or(Discard::NoRoute)?;
        if !self.up {
            return Err(Discard::Down);
        }
        let peer = &mut self.peers.get_mut(id).ok_or(Discard::NoRoute)?.peer;
        //@ C-STG-4
        let endpoint = peer.endpoint.ok_or(Discard::NoEndpoint)?;
        let way = outward::Peer {
            id,
            endpoint,
            session: peer.session(),
            mtu: self.config.mtu,
            mss: self.config.mss,
        };
        let envelope = outward::admit(&mut frame, to, &way)?;
        let cut = Splitter::new(&mut frame)?;
        let key = peer.seal_key(now.mono).filter(|_| peer.staging.is_empty());
        let Some((first, key)) = key.and_then(|k| Some((k.reserve(cut.count(), now.mono)?, k))) else {
            self.stage_all(id, &cut);
            return Ok(self.flush(id, now, out));
        };
        let (sent, bytes) = outward::seal(&cut, &envelope, key, first, self.config.mtu.into(), out);
        let lost = cut.count() - sent;
        let rekey = sent > 0 && peer.sent(now.mono, bytes, true);
        self.discard(Discard::NoRoom, lost);
        self.after_send(id, rekey, now, out);
        Ok(sent)
    }

    /// What to tell the sender of a packet that [`Device::outbound`] refused: an IP packet to be written to the TUN
    /// device, when there was no peer for it or no endpoint. At most a thousand a second, and none about packets that
    /// must not be answered.
    pub fn unreachable(&mut self, now: Now, why: Discard, packet: &[u8]) -> Option<Unreachable> {
        //@ C-OUT-3
        let nowhere = matches!(why, Discard::NoRoute | Discard::NoEndpoint);
        let answer = (nowhere && self.pace.allows(now.mono)).then(|| Unreachable::about(packet))??;
        self.pace.spend(now.mono);
        Some(answer)
    }

    /// Lets each packet of a frame wait.
    fn stage_all(&mut self, id: PeerId, cut: &Splitter<'_>) {
        let mut packet = Vec::new();
        for i in 0..cut.count() {
            packet.resize(cut.len(i), 0);
            if cut.write(i, &mut packet).is_some() {
                self.stage(id, &packet);
            }
        }
    }

    fn after_send(&mut self, id: PeerId, rekey: bool, now: Now, out: &mut impl Outbox) {
        if rekey {
            self.initiate(id, true, now, out);
        }
        self.schedule(id);
    }

    /// Lets a packet wait (C-STG-1, C-STG-2). An empty one stands for a keepalive.
    fn stage(&mut self, id: PeerId, packet: &[u8]) {
        let budget = self.config.staging_bytes.saturating_sub(self.staged_bytes);
        let Some(entry) = self.peers.get_mut(id) else { return };
        let staging = &mut entry.peer.staging;
        let before = staging.bytes();
        let dropped = staging.push(packet, budget);
        self.staged_bytes = (self.staged_bytes + staging.bytes()).saturating_sub(before);
        self.discard(Discard::StagingFull, dropped);
    }

    /// Sends what waits, in order; without a usable key asks for a handshake instead. Gives how many went.
    fn flush(&mut self, id: PeerId, now: Now, out: &mut impl Outbox) -> usize {
        //@ C-STG-3
        let mtu = self.config.mtu.into();
        let (mut sent, mut rekey, mut stuck) = (0, false, false);
        while let Some(entry) = self.peers.get_mut(id) {
            let peer = &mut entry.peer;
            let Some(endpoint) = peer.endpoint else { break };
            let Some(packet) = peer.staging.front() else { break };
            let len = datagram_len(packet.len(), mtu);
            let Some(key) = peer.seal_key(now.mono) else {
                stuck = true;
                break;
            };
            // Judged when it came; what is left of its hops can be no fewer now.
            let envelope = outward::envelope(endpoint, id, packet, ip::udp_payload(packet))
                .unwrap_or_else(|_| Envelope { peer: Some(id), ..Envelope::new(endpoint) });
            let Some(slot) = out.reserve(&envelope, len, 1) else {
                peer.timers.flush_soon(now.mono);
                break;
            };
            let Some(counter) = key.reserve(1, now.mono) else {
                stuck = true;
                break;
            };
            session::lay(slot, packet.len(), |to| to.copy_from_slice(packet));
            key.seal(counter, slot);
            out.commit(len);
            let data = !packet.is_empty();
            self.staged_bytes = self.staged_bytes.saturating_sub(packet.len());
            peer.staging.pop();
            rekey |= peer.sent(now.mono, len, data);
            sent += 1;
        }
        if stuck || rekey {
            self.initiate(id, true, now, out);
        }
        self.schedule(id);
        sent
    }

    /// An empty packet, unless packets wait already: those say as much (C-TMR-6).
    fn keepalive(&mut self, id: PeerId, now: Now, out: &mut impl Outbox) {
        let Some(entry) = self.peers.get_mut(id) else { return };
        if entry.peer.endpoint.is_some() && self.local.is_some() {
            if entry.peer.staging.is_empty() {
                self.stage(id, &[]);
            }
            self.flush(id, now, out);
        }
        if let Some(entry) = self.peers.get_mut(id) {
            entry.peer.timers.kept_alive(now.mono);
        }
        self.schedule(id);
    }

    /// `bytes` of datagrams to this peer ([`Envelope::peer`]) could not be sent after all: they are taken back
    /// from its count of bytes sent. A peer that is gone meanwhile does not matter.
    pub fn unsent(&mut self, peer: PeerId, bytes: u64) {
        //@ C-OUT-6
        if let Some(entry) = self.peers.get_mut(peer) {
            let sent = &mut entry.peer.stats.tx_bytes;
            *sent = sent.saturating_sub(bytes);
        }
    }

    // -- inward ---------------------------------------------------------------------------------------

    /// One UDP read, one datagram or a train, is opened where it lies. IP packets are appended to `plain`;
    /// answers (cookie replies, keepalives, packets that waited) go to `out`. Handshake messages are queued:
    /// [`Device::poll_timeout`] is due at once then. One bad datagram never stops the rest.
    pub fn inbound(&mut self, now: Now, rx: Received<'_>, plain: &mut Vec<Span>, out: &mut impl Outbox) {
        let Received { bytes, stride, from, ecn } = rx;
        let (mut at, mut ahead) = (0, Ahead::default());
        let stride = stride.max(1);
        //@ C-IN-6
        while at < bytes.len() {
            if bytes.len() > stride && ahead.left == 0 {
                ahead = self.open_ahead(now, bytes, at, stride);
            }
            let end = bytes.len().min(at.saturating_add(stride));
            let Some(datagram) = bytes.get_mut(at..end) else { break };
            let len = datagram.len();
            let opened = ahead.next();
            let result = match wire::parse(datagram) {
                _ if !self.up => Err(Discard::Down),
                Some(Message::Data(header)) => {
                    self.data(now, header, (datagram, opened), (from, ecn), out).map(|inner| {
                        if let (Some(len), Ok(at)) = (inner, u32::try_from(at + DATA_HEADER)) {
                            plain.push(Span { at, len });
                        }
                    })
                }
                Some(message) => self.message(now, &message, from, out),
                None => Err(Discard::Malformed),
            };
            //@ C-SIL-1
            if let Err(why) = result {
                self.discard(why, 1);
            }
            at += len;
        }
    }

    /// Opens the data messages from `at` on that belong to one session and follow each other, before anything is
    /// made of them: a cipher may take many at once.
    fn open_ahead(&mut self, now: Now, bytes: &mut [u8], at: usize, stride: usize) -> Ahead {
        let (mut jobs, mut used, mut index) = ([Job::default(); MOST], 0, None);
        let train = bytes.get(at..).unwrap_or_default();
        for (n, (job, datagram)) in jobs.iter_mut().zip(train.chunks(stride)).enumerate() {
            let Some(Message::Data(header)) = wire::parse(datagram) else { break };
            if *index.get_or_insert(header.receiver) != header.receiver {
                break;
            }
            let len = datagram.len().saturating_sub(DATA_OVERHEAD);
            *job = Job { at: at + n * stride + DATA_HEADER, len, counter: header.counter };
            used = n + 1;
        }
        let peer = index.filter(|_| self.up).and_then(|index| Some((index, self.indices.keypair(index)?)));
        let Some((index, entry)) = peer.and_then(|(index, id)| Some((index, self.peers.get_mut(id)?))) else {
            return Ahead { left: used.max(1), ..Ahead::default() };
        };
        let (tried, right) =
            entry.peer.open_ahead(index, bytes, jobs.get(..used).unwrap_or_default(), now.mono);
        Ahead { left: used, tried, right }
    }

    /// Gives the length of the IP packet that starts at offset 16; `None` for a keepalive.
    fn data(
        &mut self,
        now: Now,
        header: DataHeader,
        (datagram, ahead): (&mut [u8], Option<bool>),
        (from, ecn): (Endpoint, Ecn),
        out: &mut impl Outbox,
    ) -> Result<Option<u16>, Discard> {
        let id = self.indices.keypair(header.receiver).ok_or(Discard::UnknownIndex)?;
        let entry = self.peers.get_mut(id).ok_or(Discard::UnknownIndex)?;
        let body = datagram.get_mut(DATA_HEADER..).ok_or(Discard::Malformed)?;
        let opened = entry.peer.open(header, body, ahead, Some(from), now)?;
        if opened.roamed {
            self.event(Event::EndpointChanged(id));
        }
        if opened.confirmed {
            self.indices.free(opened.freed);
            self.event(Event::SessionEstablished(id));
            self.flush(id, now, out);
        }
        if opened.rekey {
            self.initiate(id, true, now, out);
        }
        self.schedule(id);
        if opened.len == 0 {
            return Ok(None);
        }
        let padded = body.get_mut(..opened.len).ok_or(Discard::NotIp)?;
        let len = ip::length(padded).ok_or(Discard::NotIp)?;
        //@ C-IN-4
        if ip::source(padded).and_then(|source| self.route(source, IN)) != Some(id) {
            return Err(Discard::Spoofed);
        }
        ip::decapsulate(padded, ecn);
        mss::clamp(padded.get_mut(..len).unwrap_or_default(), self.config.mss, self.config.mtu, false);
        //@ C-IN-7
        if let Some(entry) = self.peers.get_mut(id) {
            entry.peer.stats.rx_bytes += (DATA_OVERHEAD + opened.len) as u64;
        }
        u16::try_from(len).map(Some).map_err(|_| Discard::NotIp)
    }
}

/// What was opened before its turn: one bit each for the next `left` datagrams.
#[derive(Clone, Copy, Default)]
struct Ahead {
    left: usize,
    tried: u64,
    right: u64,
}

impl Ahead {
    /// Whether the next datagram is right; `None`: not opened yet.
    const fn next(&mut self) -> Option<bool> {
        let (tried, right) = (self.tried & 1 != 0, self.right & 1 != 0);
        (self.left, self.tried, self.right) = (self.left.saturating_sub(1), self.tried >> 1, self.right >> 1);
        if tried { Some(right) } else { None }
    }
}

#[cfg(test)]
#[path = "../tests/unit/device.rs"]
mod tests;
