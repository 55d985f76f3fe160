//! One thread's straight line: commands, datagrams in, packets out, timers, and round again.
//!
//! The worker knows the rooms, the rooms do not know it: it owns the [`Device`], a TUN queue, the UDP sockets
//! and all memory a packet passes through, allocated at the start. `fv` runs it on a thread of its own and
//! speaks to it through a [`Handle`]; tests drive it turn by turn over queues in memory.

use core::fmt;
use core::time::Duration;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};

use crate::arena::{Arena, Outlet};
use crate::batch::{Frame, Span};
use crate::carrier::Carrier;
use crate::config::{DeviceSnapshot, DeviceUpdate};
use crate::crew::{Crew, Tolls};
use crate::delivery::Delivery;
use crate::device::{ConfigError, Device, PeerId};
use crate::event::{Discard, Event};
use crate::handle::{Command, ConfigureError, Counters, Handle, Inbox, Status};
use crate::io::{Offloads, Poller, Ready, RxSlots, TunQueue, Udp, UdpQueue, device_gone};
use crate::key::PublicKey;
use crate::offload::VnetHdr;
use crate::time::{Clock, Instant, Now};

/// Datagrams read per turn.
const RX_SLOTS: usize = 64;
/// Packets read from TUN per turn, so that the other direction gets its share.
const FRAMES_PER_TURN: usize = 64;
/// Bytes read from TUN per turn, likewise.
const BYTES_PER_TURN: usize = 128 << 10;
/// Bytes of sealed datagrams that are sent although more may be sealed in this turn.
const GOOD_LOAD: usize = 48 << 10;
/// The longest packet of a TUN device, and then some.
const FRAME: usize = 65_536;
/// Most data messages that fit one receive slot: 65 536 bytes of messages of 32 bytes.
const MAX_SPANS: usize = 2048;
/// Most data messages that fit a slot of 2 KiB.
const NEAR_SPANS: usize = 64;
/// How often it is looked what carriers sent: timers are seconds, and counts are read by people.
const LOOK: Duration = Duration::from_millis(100);
/// Events that wait to be read; one more is dropped.
const MAX_EVENTS: usize = 1024;

/// What to do after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Park {
    /// There is more to do: take another turn.
    Busy,
    /// Nothing to do until a packet or a command comes, or this instant.
    Until(Instant),
    /// Nothing to do until a packet or a command comes.
    Idle,
}

/// Why a worker cannot go on.
#[derive(Debug)]
#[non_exhaustive]
pub enum Fatal {
    /// The TUN interface was deleted.
    TunGone,
    /// The system refused what must work.
    Os {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for Fatal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TunGone => f.write_str("the interface was deleted"),
            Self::Os { action, source } => write!(f, "{action}: {source}"),
        }
    }
}

impl std::error::Error for Fatal {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Os { source, .. } = self { Some(source) } else { None }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TunCounters {
    pub(crate) read: u64,
    pub(crate) read_errors: u64,
}

/// Packets on their way out of a TUN queue: what is read, and where it is sealed and sent.
pub(crate) struct Drain<'a, T, U> {
    pub(crate) tun: &'a mut T,
    pub(crate) udp: &'a mut U,
    pub(crate) frame: &'a mut [u8],
    pub(crate) arena: &'a mut Arena,
    pub(crate) counters: &'a mut TunCounters,
    /// There was a pause: the first packet does not wait for more.
    pub(crate) woken: bool,
}

impl Drain<'_, (), ()> {
    /// Memory for one packet and its header.
    pub(crate) fn frame() -> Box<[u8]> {
        vec![0; VnetHdr::LEN + FRAME].into_boxed_slice()
    }
}

impl<T: TunQueue, U: UdpQueue> Drain<'_, T, U> {
    /// Has `each` treat the packets that wait, a bounded number, or until it says that the interface is gone. Gives
    /// whether more may wait.
    #[inline(always)]
    pub(crate) fn all(
        self,
        mut each: impl FnMut(&mut T, VnetHdr, &mut [u8], &mut Outlet<'_, U>) -> bool,
    ) -> Result<bool, Fatal> {
        let Drain { tun, udp, frame, arena, counters, woken } = self;
        let (mut frames, mut bytes, mut errors) = (0, 0, 0);
        while frames < FRAMES_PER_TURN && bytes < BYTES_PER_TURN {
            let (len, hdr) = match tun.recv_in(frame) {
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if device_gone(&e) => return Err(Fatal::TunGone),
                Err(_) => {
                    // The next packet may be a better one; but a queue that only fails is left alone.
                    counters.read_errors += 1;
                    (frames, errors) = (frames + 1, errors + 1);
                    continue;
                }
            };
            frames += 1;
            bytes += len;
            counters.read += 1;
            let Some(bytes) = frame.get_mut(VnetHdr::LEN..VnetHdr::LEN + len) else { continue };
            if each(tun, hdr, bytes, &mut arena.outlet(udp)) {
                return Err(Fatal::TunGone);
            }
            // The first one after a pause does not wait to see whether more follow; and while we seal on, the peer
            // may open what is a good load already.
            if (woken && frames == 1) || arena.filled() >= GOOD_LOAD {
                arena.flush(udp);
            }
        }
        Ok(errors < frames)
    }
}

/// A whole datapath: one TUN queue, one UDP socket pair, one thread.
#[derive(Debug)]
pub struct Worker<T, U, C> {
    device: Device,
    tun: T,
    udp: U,
    clock: C,
    poller: Poller,
    /// Dropped when the worker ends, so that whoever asks it something learns that.
    inbox: Option<Inbox>,
    /// What is worth a read this turn.
    ready: Ready,
    slots: RxSlots,
    spans: Vec<Span>,
    delivery: Delivery,
    frame: Box<[u8]>,
    arena: Arena,
    tun_counters: TunCounters,
    events: Option<SyncSender<(Event, Option<PublicKey>)>>,
    /// As configured, or as chosen by the kernel since; 0 = any.
    port: u16,
    fwmark: u32,
    stopped: bool,
    /// Shared with the threads that carry packets outward, when there are any.
    crew: Option<Arc<Crew>>,
    /// Peers whose packets came by the post in this turn.
    treated: Vec<PeerId>,
    /// Peers that carriers send to, and when to look what.
    noted: Vec<PeerId>,
    look_again: Option<Instant>,
}

impl<T: TunQueue, U: UdpQueue, C: Clock> Worker<T, U, C> {
    /// A worker whose link is down, and the way to speak to it.
    ///
    /// # Errors
    /// Out of descriptors, or the TUN queue cannot be watched.
    pub fn new(device: Device, mut tun: T, udp: U, clock: C) -> io::Result<(Self, Handle)> {
        let poller = Poller::new()?;
        tun.attach(&poller)?;
        let merging = tun.caps().tso;
        let (inbox, handle) = Inbox::new(poller.waker());
        let worker = Self {
            device,
            tun,
            udp,
            clock,
            poller,
            inbox: Some(inbox),
            ready: Ready::ALL,
            slots: RxSlots::new(RX_SLOTS),
            spans: Vec::with_capacity(MAX_SPANS),
            delivery: Delivery::new(MAX_SPANS, merging),
            frame: Drain::frame(),
            arena: Arena::new(),
            tun_counters: TunCounters::default(),
            events: None,
            port: 0,
            fwmark: 0,
            stopped: false,
            crew: None,
            treated: Vec::new(),
            noted: Vec::new(),
            look_again: None,
        };
        Ok((worker, handle))
    }

    /// Whether received TCP segments of one flow are joined into one write, where the TUN device takes that.
    pub fn set_merging(&mut self, on: bool) {
        self.delivery.set_merging(on && self.tun.caps().tso);
    }

    /// Whether received UDP datagrams of one flow and size are joined, too, where the TUN device takes that.
    pub fn set_merging_udp(&mut self, on: bool) {
        self.delivery.set_merging_udp(on && self.tun.caps().uso);
    }

    /// From now on events, with the key of the peer they are about, come out here; at most 1024 wait.
    pub fn events(&mut self) -> Receiver<(Event, Option<PublicKey>)> {
        let (sender, receiver) = mpsc::sync_channel(MAX_EVENTS);
        self.events = Some(sender);
        receiver
    }

    /// From now on this worker only receives; `tun` is read by a carrier, on a thread of its own that uses this `clock`
    /// and these offloads. To be called before the worker runs and is configured, once for each carrier, each with a
    /// queue of its own.
    ///
    /// # Errors
    /// Out of descriptors, or the TUN queue cannot be watched.
    pub fn carrier(&mut self, tun: T, offloads: Offloads, clock: C) -> io::Result<Carrier<T, C>> {
        let crew = match &self.crew {
            Some(crew) => Arc::clone(crew),
            None => {
                self.tun.detach(&self.poller)?;
                self.device.watch();
                Arc::clone(self.crew.insert(Arc::new(Crew::new(self.poller.waker()))))
            }
        };
        Carrier::new(crew, tun, Udp::with_offloads(offloads), clock)
    }

    /// The TUN queue.
    pub const fn tun(&mut self) -> &mut T {
        &mut self.tun
    }

    /// The UDP sockets.
    pub const fn udp(&mut self) -> &mut U {
        &mut self.udp
    }

    /// Works until [`Handle::stop`]. After that, and after an error, every [`Handle`] finds the worker gone.
    ///
    /// # Errors
    /// [`Fatal`].
    pub fn run(&mut self) -> Result<(), Fatal> {
        let result = self.work();
        if let Some(crew) = &self.crew {
            crew.stop();
        }
        self.inbox = None;
        self.udp.close();
        result
    }

    fn work(&mut self) -> Result<(), Fatal> {
        loop {
            let now = self.clock.now();
            let deadline = match self.round(now)? {
                _ if self.stopped => return Ok(()),
                Park::Busy => {
                    self.ready = Ready::ALL;
                    continue;
                }
                Park::Until(deadline) => Some(deadline),
                Park::Idle => None,
            };
            let parked = self.poller.park(now.mono, deadline);
            self.ready = parked.map_err(|source| Fatal::Os { action: "cannot wait for packets", source })?;
        }
    }

    /// One round: never blocks, and does a bounded amount of each kind of work.
    ///
    /// # Errors
    /// [`Fatal`].
    pub fn turn(&mut self) -> Result<Park, Fatal> {
        self.ready = Ready::ALL;
        let now = self.clock.now();
        self.round(now)
    }

    /// A turn that passes by the queues that are known to be dry.
    fn round(&mut self, now: Now) -> Result<Park, Fatal> {
        if self.inbox.as_ref().is_some_and(Inbox::is_posted) {
            self.obey(now);
            // The sockets may be others now.
            self.ready = Ready::ALL;
        }
        let alone = self.crew.is_none();
        if !alone {
            self.attend(now)?;
        }
        self.udp.stirred(self.ready);
        let more_in = self.inward(now)?;
        let more_out = self.ready.tun && alone && self.outward(now)?;
        if self.device.poll_timeout().is_some_and(|at| at <= now.mono) {
            self.device.handle_timeout(now, &mut self.arena.outlet(&mut self.udp));
        }
        self.arena.flush(&mut self.udp);
        while let Some((peer, bytes)) = self.arena.poll_unsent() {
            self.device.unsent(peer, bytes);
        }
        while let Some(endpoint) = self.udp.poll_lost_source() {
            self.device.forget_local(endpoint);
        }
        let look_again = if alone { None } else { self.show(now) };
        self.report();
        Ok(match self.device.poll_timeout() {
            _ if more_in || more_out => Park::Busy,
            Some(at) if at <= now.mono => Park::Busy,
            Some(at) => Park::Until(look_again.map_or(at, |look| look.min(at))),
            None => look_again.map_or(Park::Idle, Park::Until),
        })
    }

    // -- UDP to TUN -----------------------------------------------------------------------------------

    /// Whether more may wait.
    fn inward(&mut self, now: Now) -> Result<bool, Fatal> {
        let Ok(used) = self.udp.recv(&mut self.slots) else {
            // Nothing waits. An error of the sockets is counted there and would not be helped by haste.
            return Ok(false);
        };
        //@ C-IN-6
        let (filled, count) = (self.slots.filled(), self.slots.count());
        for i in 0..filled {
            // Short datagrams lie beside each other: packets of one flow are joined across them.
            let place = self.slots.place(i);
            if place.is_none() || self.spans.len() + NEAR_SPANS > MAX_SPANS {
                self.deliver(None)?;
            }
            let Some(received) = self.slots.received(i) else { break };
            let before = self.spans.len();
            self.device.inbound(now, received, &mut self.spans, &mut self.arena.outlet(&mut self.udp));
            match place {
                Some(place) => {
                    for span in self.spans.iter_mut().skip(before) {
                        span.at = span.at.saturating_add(place as u32);
                    }
                }
                None => self.deliver(Some(i))?,
            }
        }
        self.deliver(None)?;
        Ok(used >= count)
    }

    /// Writes the packets that lie in slot `i`, or in the short slots, to the TUN device.
    fn deliver(&mut self, i: Option<usize>) -> Result<(), Fatal> {
        let bytes = match i {
            Some(i) => self.slots.received(i).map(|received| received.bytes),
            None => Some(self.slots.near()),
        };
        if let Some(bytes) = bytes.filter(|_| !self.spans.is_empty()) {
            self.delivery.write(&mut self.tun, bytes, &self.spans)?;
        }
        self.spans.clear();
        Ok(())
    }

    // -- TUN to UDP -----------------------------------------------------------------------------------

    /// Whether more may wait.
    fn outward(&mut self, now: Now) -> Result<bool, Fatal> {
        let woken = self.ready != Ready::ALL;
        let Self { device, tun, udp, frame, arena, delivery, tun_counters, .. } = self;
        let drain = Drain { tun, udp, frame, arena, counters: tun_counters, woken };
        drain.all(|tun, hdr, bytes, out| {
            // Why a packet is not let through is counted by the device.
            if let Err(why) = device.outbound(now, Frame { hdr, bytes }, out)
                && let Some(answer) = device.unreachable(now, why, bytes)
            {
                return delivery.answer(tun, &answer).is_err();
            }
            false
        })
    }

    // -- carriers -------------------------------------------------------------------------------------

    /// Treats what carriers left to the worker.
    #[cold]
    fn attend(&mut self, now: Now) -> Result<(), Fatal> {
        let Some(crew) = self.crew.clone() else { return Ok(()) };
        if self.look_again.is_some_and(|at| at <= now.mono) {
            self.tally(now, &crew, true);
        }
        if !crew.is_stirred() {
            return Ok(());
        }
        if crew.is_gone() {
            return Err(Fatal::TunGone);
        }
        for n in 1..=FRAMES_PER_TURN {
            let Some(mut posted) = crew.next_packet() else { break };
            if n == FRAMES_PER_TURN {
                crew.again();
            }
            let frame = Frame { hdr: posted.hdr, bytes: &mut posted.bytes };
            if let Err(why) = self.device.outbound(now, frame, &mut self.arena.outlet(&mut self.udp))
                && let Some(answer) = self.device.unreachable(now, why, &posted.bytes)
            {
                self.delivery.answer(&mut self.tun, &answer)?;
            }
            self.treated.extend(posted.peer);
        }
        crew.noted(&mut self.noted);
        if !self.noted.is_empty() && self.look_again.is_none() {
            self.look_again = Some(now.mono.after(LOOK));
        }
        while let Some(endpoint) = crew.next_lost_source() {
            self.device.forget_local(endpoint);
        }
        while let (Some(given_up), Some(events)) = (crew.next_given_up(), &self.events) {
            let _ = events.try_send((Event::OffloadGivenUp(given_up), None));
        }
        Ok(())
    }

    /// Adds up what carriers sent. Peers that they send to steadily are looked at ten times a second; with `rest` those
    /// to which nothing was sent since the last look are let go until the carriers tell.
    fn tally(&mut self, now: Now, crew: &Crew, rest: bool) {
        let Self { device, arena, udp, noted, .. } = self;
        noted.retain(|&id| {
            let look = || {
                let view = crew.view();
                let tally = &view.ways.get(&id)?.tally;
                let taken = tally.take();
                if taken.is_none() && rest {
                    tally.forget();
                    // Whoever sent before that did not tell.
                    return Some((tally.take(), false));
                }
                Some((taken, true))
            };
            let Some((taken, keep)) = look() else { return false };
            if let Some((bytes, at)) = taken {
                device.carried(id, bytes, at, now, &mut arena.outlet(udp));
            }
            keep
        });
        self.look_again = (!self.noted.is_empty()).then(|| now.mono.after(LOOK));
    }

    /// Carriers go by what was just configured, before whoever asked for it is told.
    fn show_all(&mut self, now: Now) {
        if let Some(crew) = self.crew.clone() {
            // All that was laid out before goes first.
            self.arena.flush(&mut self.udp);
            crew.show(&mut self.device, self.udp.sockets(), now);
            self.release(&crew);
        }
    }

    /// After all of a turn was sent: carriers may go on where the worker left off. Gives when to look what they sent.
    #[cold]
    fn show(&mut self, now: Now) -> Option<Instant> {
        let crew = self.crew.clone()?;
        crew.follow(&mut self.device, now);
        self.release(&crew);
        self.look_again
    }

    /// The packets that came by the post in this turn are sent, or wait where no other overtakes them.
    fn release(&mut self, crew: &Crew) {
        for id in self.treated.drain(..) {
            crew.treated(id);
        }
    }

    // -- the cold door --------------------------------------------------------------------------------

    fn obey(&mut self, now: Now) {
        while let Some(command) = self.inbox.as_ref().and_then(Inbox::next) {
            // Whoever asked and has gone since does not want to know.
            match command {
                Command::Configure(update, reply) => drop(reply.try_send(self.configure(&update, now))),
                Command::Snapshot(reply) => {
                    if let Some(crew) = self.crew.clone() {
                        crew.noted(&mut self.noted);
                        self.tally(now, &crew, false);
                    }
                    drop(reply.try_send(self.snapshot()));
                }
                Command::Counters(reply) => drop(reply.try_send(self.counters())),
                Command::Status(reply) => drop(reply.try_send(self.status())),
                Command::SetLink { up, mtu, reply } => drop(reply.try_send(self.set_link(up, mtu, now))),
                Command::Stop => self.stopped = true,
            }
        }
    }

    /// First what may be refused, then the rest.
    fn configure(&mut self, update: &DeviceUpdate, now: Now) -> Result<(), ConfigureError> {
        self.device.check(update).map_err(refused)?;
        let (port, fwmark) = (update.listen_port.unwrap_or(self.port), update.fwmark.unwrap_or(self.fwmark));
        let sockets = update.listen_port.is_some() || update.fwmark.is_some();
        if sockets && self.device.is_up() {
            self.open(port, fwmark)?;
        } else {
            (self.port, self.fwmark) = (port, fwmark);
        }
        let done = self.device.configure(update, now, &mut self.arena.outlet(&mut self.udp));
        self.show_all(now);
        done.map_err(refused)
    }

    fn open(&mut self, port: u16, fwmark: u32) -> Result<(), ConfigureError> {
        //@ C-OUT-8
        self.port = self.udp.open(port, fwmark).map_err(|source| match source.raw_os_error() {
            // A port that may not be used gives EACCES.
            Some(libc::EPERM) => ConfigureError::Mark { fwmark, source },
            _ => ConfigureError::Bind { port, source },
        })?;
        self.fwmark = fwmark;
        self.udp.attach(&self.poller).map_err(|source| ConfigureError::Bind { port, source })
    }

    fn set_link(&mut self, up: bool, mtu: u16, now: Now) -> Result<(), ConfigureError> {
        self.device.set_mtu(mtu);
        if up == self.device.is_up() {
            self.show_all(now);
            return Ok(());
        }
        if up {
            self.open(self.port, self.fwmark)?;
        }
        self.device.set_up(up, now, &mut self.arena.outlet(&mut self.udp));
        if !up {
            //@ C-TMR-12
            self.arena.flush(&mut self.udp);
            self.udp.close();
        }
        self.show_all(now);
        Ok(())
    }

    fn snapshot(&self) -> DeviceSnapshot {
        DeviceSnapshot { listen_port: self.port, fwmark: self.fwmark, ..self.device.snapshot() }
    }

    fn status(&self) -> Status {
        let tolls = self.tolls();
        let mut udp = self.udp.status();
        if let Some(udp) = &mut udp {
            // The worker itself sends next to nothing then.
            udp.segments =
                tolls.iter().map(|tolls| tolls.segments).filter(|&n| n > 0).fold(udp.segments, usize::min);
        }
        Status {
            up: self.device.is_up(),
            threads: 1 + tolls.len(),
            tun: self.tun.caps(),
            merging: self.delivery.is_merging(),
            merging_udp: self.delivery.is_merging_udp(),
            udp,
            cipher: self.device.cipher(),
        }
    }

    fn tolls(&self) -> Vec<Tolls> {
        self.crew.as_ref().map(|crew| crew.tolls()).unwrap_or_default()
    }

    fn counters(&self) -> Counters {
        let (mut udp, mut tun, written) = (self.udp.counters(), self.tun_counters, self.delivery.counters());
        let (mut lost, mut discards) = (self.arena.lost(), *self.device.discards());
        for tolls in self.tolls() {
            udp.add(&tolls.udp);
            tun.read += tolls.read;
            tun.read_errors += tolls.read_errors;
            lost += tolls.lost;
            discards.iter_mut().zip(tolls.discards).for_each(|(sum, n)| *sum += n);
        }
        let discards = Discard::ALL.iter().zip(discards).map(|(&(_, name), n)| (name, n));
        let io = [
            ("udp_received", udp.received),
            ("udp_truncated", udp.truncated),
            ("udp_receive_errors", udp.receive_errors),
            ("udp_sent", udp.sent),
            ("udp_lost_full", udp.lost_full + lost),
            ("udp_lost_refused", udp.lost_refused),
            ("udp_lost_no_socket", udp.lost_no_socket),
            ("udp_source_lost", udp.source_lost),
            ("udp_gso_fallbacks", udp.gso_fallbacks),
            ("udp_reads", udp.reads),
            ("udp_writes", udp.writes),
            ("tun_read", tun.read),
            ("tun_read_errors", tun.read_errors),
            ("tun_written", written.written),
            ("tun_merged_writes", written.merged_writes),
            ("tun_merged_packets", written.merged_packets),
            ("tun_merge_fallbacks", written.merge_fallbacks),
            ("tun_lost_down", written.lost_down),
            ("tun_lost_refused", written.lost_refused),
            ("tun_unreachable", written.unreachable),
        ];
        Counters(discards.chain(io).collect())
    }

    /// Hands events to whoever wants them; without anybody the device keeps the latest.
    fn report(&mut self) {
        let Some(events) = &self.events else { return };
        while let Some(event) = self.device.poll_event() {
            let key = match event {
                Event::SessionEstablished(id)
                | Event::HandshakeFailed(id)
                | Event::EndpointChanged(id)
                | Event::SessionExpired(id) => self.device.public_key(id),
                Event::OffloadGivenUp(_) => None,
            };
            let _ = events.try_send((event, key));
        }
        while let Some(given_up) = self.udp.poll_given_up().or_else(|| self.delivery.poll_given_up()) {
            let _ = events.try_send((Event::OffloadGivenUp(given_up), None));
        }
    }
}

const fn refused(error: ConfigError) -> ConfigureError {
    match error {
        ConfigError::TooManyPeers => ConfigureError::TooManyPeers,
    }
}

#[cfg(test)]
mod tests;
