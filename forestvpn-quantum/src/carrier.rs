//! A thread that only carries packets outward, beside the worker that owns the device: TUN queue, its own memory, the
//! worker's sockets. See `crew.rs` for what they share.

use core::net::IpAddr;
use std::io;
use std::sync::Arc;

use crate::arena::{Arena, Outlet};
use crate::batch::Frame;
use crate::crew::{Crew, Tolls, View};
use crate::device::PeerId;
use crate::event::Discard;
use crate::io::{Poller, TunQueue, Udp, UdpQueue};
use crate::ip;
use crate::offload::split::Splitter;
use crate::outward;
use crate::time::{Clock, Instant};
use crate::timers::REJECT_AFTER_TIME;
use crate::worker::{Drain, Fatal, TunCounters};

/// Carries packets from one TUN queue to the network, from when it is run until the worker ends.
#[derive(Debug)]
pub struct Carrier<T, C> {
    crew: Arc<Crew>,
    number: usize,
    tun: T,
    udp: Udp,
    clock: C,
    poller: Poller,
    frame: Box<[u8]>,
    arena: Arena,
    tun_counters: TunCounters,
    /// Without what the sockets count themselves.
    tolls: Tolls,
    /// The last route found, and when it was.
    recent: Option<(u64, IpAddr, PeerId)>,
}

/// What a packet needs that the carrier cannot give.
enum Stop {
    /// It is dropped and counted.
    Refused(Discard),
    /// The worker shall treat it.
    Posted,
}

impl From<Discard> for Stop {
    fn from(why: Discard) -> Self {
        Self::Refused(why)
    }
}

impl<T: TunQueue, C: Clock> Carrier<T, C> {
    pub(crate) fn new(crew: Arc<Crew>, mut tun: T, udp: Udp, clock: C) -> io::Result<Self> {
        let poller = Poller::new()?;
        tun.attach(&poller)?;
        let number = crew.join(poller.waker());
        Ok(Self {
            crew,
            number,
            tun,
            udp,
            clock,
            poller,
            frame: Drain::frame(),
            arena: Arena::new(),
            tun_counters: TunCounters::default(),
            tolls: Tolls::default(),
            recent: None,
        })
    }

    /// Works until the worker ends.
    ///
    /// # Errors
    /// [`Fatal`]; the worker is told, and ends too.
    pub fn run(&mut self) -> Result<(), Fatal> {
        let result = self.work();
        if result.is_err() {
            self.crew.tun_gone();
        }
        result
    }

    fn work(&mut self) -> Result<(), Fatal> {
        let mut woken = false;
        loop {
            let now = self.clock.now().mono;
            let Some(more) = self.turn(now, woken)? else { return Ok(()) };
            woken = !more;
            if !more {
                let parked = self.poller.park(now, None);
                parked.map_err(|source| Fatal::Os { action: "cannot wait for packets", source })?;
            }
        }
    }

    /// Carries a bounded number of packets. Gives whether more may wait; `None`: the worker has ended.
    fn turn(&mut self, now: Instant, woken: bool) -> Result<Option<bool>, Fatal> {
        let Self { crew, number, tun, udp, frame, arena, tun_counters, tolls, recent, .. } = self;
        let view = crew.view();
        if view.stopped {
            return Ok(None);
        }
        udp.borrow(view.sockets.as_ref());
        let drain = Drain { tun, udp, frame, arena, counters: tun_counters, woken };
        let drained = drain.all(|_, hdr, bytes, out| {
            let why = match carry(crew, &view, recent, Frame { hdr, bytes }, tolls, now, out) {
                Ok(()) => return false,
                Err(Stop::Refused(why)) => why,
                Err(Stop::Posted) => {
                    let id = recent.as_ref().map(|(_, _, id)| *id);
                    let way = id.and_then(|id| Some((id, &view.ways.get(&id)?.tally)));
                    if crew.post(hdr, bytes, way) {
                        return false;
                    }
                    Discard::StagingFull
                }
            };
            tolls.discard(why, 1);
            false
        });
        arena.flush(udp);
        while let Some((id, bytes)) = arena.poll_unsent() {
            if let Some(way) = view.ways.get(&id) {
                Crew::untally(&way.tally, bytes);
            }
        }
        while let Some(endpoint) = udp.poll_lost_source() {
            crew.lost_source(endpoint);
        }
        while let Some(what) = udp.poll_given_up() {
            crew.given_up(what);
        }
        tolls.segments = view.sockets.as_ref().map_or(0, |_| udp.caps().gso_segments);
        udp.borrow(None);
        drop(view);
        (tolls.read, tolls.read_errors) = (tun_counters.read, tun_counters.read_errors);
        (tolls.udp, tolls.lost) = (udp.counters(), arena.lost());
        crew.count(*number, *tolls);
        drained.map(Some)
    }
}

/// Seals a packet to where the view says.
fn carry(
    crew: &Crew,
    view: &View,
    recent: &mut Option<(u64, IpAddr, PeerId)>,
    mut frame: Frame<'_>,
    tolls: &mut Tolls,
    now: Instant,
    out: &mut Outlet<'_, Udp>,
) -> Result<(), Stop> {
    let to = ip::destination(frame.bytes).ok_or(Discard::NotIp)?;
    let id = match *recent {
        Some((edition, ip, id)) if edition == view.edition && ip == to => id,
        _ => {
            *recent = None;
            let id = view.routes.lookup(to).ok_or(Stop::Posted)?;
            *recent = Some((view.edition, to, id));
            id
        }
    };
    if !view.up {
        return Err(Discard::Down.into());
    }
    let way = view.ways.get(&id).ok_or(Stop::Posted)?;
    let (Some(endpoint), Some(key)) = (way.endpoint, &way.key) else { return Err(Stop::Posted) };
    if way.tally.is_posted() || key.reached(REJECT_AFTER_TIME, now) {
        return Err(Stop::Posted);
    }
    let peer = outward::Peer { id, endpoint, session: Some(key), mtu: view.mtu, mss: view.mss };
    let envelope = outward::admit(&mut frame, to, &peer)?;
    let cut = Splitter::new(&mut frame)?;
    let first = key.reserve(cut.count(), now).ok_or(Stop::Posted)?;
    let (sent, bytes) = outward::seal(&cut, &envelope, key, first, view.mtu.into(), out);
    if sent > 0 {
        crew.tally(id, &way.tally, bytes, now);
    }
    tolls.discard(Discard::NoRoom, cut.count() - sent);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::net::SocketAddr;
    use std::thread::{JoinHandle, sleep};
    use std::time::Duration;

    use super::*;
    use crate::config::{AllowedIp, DeviceUpdate, PeerUpdate};
    use crate::crew::Tally;
    use crate::harness::{A, B, packet};
    use crate::io::mem::{MemTun, tun_pair};
    use crate::io::{BootClock, Offloads};
    use crate::key::PrivateKey;
    use crate::offload::VnetHdr;
    use crate::time::OsEntropy;
    use crate::{Device, DeviceConfig, Handle, Worker};

    fn key(host: usize) -> PrivateKey {
        PrivateKey::new([host as u8 + 1; 32])
    }

    fn peer(host: usize, endpoint: Option<SocketAddr>) -> PeerUpdate {
        let net = format!("10.0.0.{}/32", host + 1).parse().unwrap();
        PeerUpdate {
            endpoint,
            allowed_ips: vec![AllowedIp { net, remove: false }],
            ..PeerUpdate::new(key(host).public_key())
        }
    }

    /// An end with a carrier: what the machine sends into it, what it gets out of it.
    struct End {
        into: MemTun,
        out: MemTun,
        handle: Handle,
        threads: Vec<JoinHandle<Result<(), Fatal>>>,
    }

    impl End {
        fn new(host: usize) -> Self {
            let ((writes, out), (reads, into)) = (tun_pair(4096), tun_pair(4096));
            let device = Device::new(DeviceConfig::default(), Box::new(OsEntropy));
            let (mut worker, handle) = Worker::new(device, writes, Udp::new(), BootClock::default()).unwrap();
            let mut carrier = worker.carrier(reads, Offloads::default(), BootClock::default()).unwrap();
            let threads =
                vec![std::thread::spawn(move || worker.run()), std::thread::spawn(move || carrier.run())];
            let own = DeviceUpdate {
                private_key: Some(Some(key(host))),
                listen_port: Some(0),
                peers: vec![peer(1 - host, None)],
                ..Default::default()
            };
            handle.configure(own).unwrap();
            handle.set_link(true, 1420).unwrap();
            Self { into, out, handle, threads }
        }

        fn give(&mut self, bytes: &[u8]) {
            self.into.send(&VnetHdr::default(), &[IoSlice::new(bytes)]).unwrap();
        }

        /// The next packet, waited for.
        fn take(&mut self) -> Vec<u8> {
            let mut buf = vec![0; 65_536];
            for _ in 0..200_000 {
                if let Ok((len, _)) = self.out.recv(&mut buf) {
                    buf.truncate(len);
                    return buf;
                }
                sleep(Duration::from_micros(50));
            }
            panic!("no packet within 10 s");
        }

        fn count(&self, name: &str) -> u64 {
            self.handle.counters().unwrap().get(name).unwrap()
        }

        fn end(self) {
            self.handle.stop();
            self.threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        }
    }

    fn connected() -> (End, End) {
        let (a, b) = (End::new(A), End::new(B));
        let port = b.handle.snapshot().unwrap().listen_port;
        let to_b = peer(B, Some(SocketAddr::from(([127, 0, 0, 1], port))));
        a.handle.configure(DeviceUpdate { peers: vec![to_b], ..Default::default() }).unwrap();
        (a, b)
    }

    /// From the first packets, which wait for a handshake in the worker's hands, to those that the carrier sends.
    #[test]
    fn nothing_is_lost_or_overtaken_when_the_worker_hands_a_peer_to_the_carrier() {
        for round in 0..4_u32 {
            let (mut a, mut b) = connected();
            let numbered = |i: u32| packet(A, B, &[i.to_be_bytes(), round.to_be_bytes()].concat());
            // As many as may wait, then more without a pause, while the handshake is under way and over.
            (0..100).for_each(|i| a.give(&numbered(i)));
            assert_eq!(b.take(), numbered(0));
            for i in 1..2000 {
                if i >= 100 {
                    a.give(&numbered(i));
                }
                if i % 3 == 0 {
                    b.give(&packet(B, A, b"answer"));
                }
                assert_eq!(b.take(), numbered(i), "round {round}");
            }
            // The worker sent the first ones, the carrier nearly all.
            // (It counts at the end of a turn, when the last packet may have arrived already.)
            let counted = || a.count("tun_read") == 2000 && a.count("udp_sent") >= 2001;
            assert!((0..1000).any(|_| counted() || {
                sleep(Duration::from_millis(1));
                false
            }));
            // 2000 packets of 36 bytes, padded to 48 and 32 around, and an initiation or two.
            let sent = a.handle.snapshot().unwrap().peers[0].tx_bytes;
            assert!((160_000..161_000).contains(&sent), "{sent}");
            let losses = ["staging_full", "no_route", "udp_lost_full", "udp_lost_refused", "tun_read_errors"];
            assert_eq!(losses.map(|name| a.count(name)), [0; 5]);
            a.end();
            b.end();
        }
    }

    /// It does not stop anybody, and it is counted.
    #[test]
    fn what_the_post_cannot_hold_is_counted_as_dropped() {
        let (inside, mut machine) = tun_pair(4096);
        let device = Device::new(DeviceConfig::default(), Box::new(OsEntropy));
        let (writes, _out) = tun_pair(16);
        let (mut worker, handle) = Worker::new(device, writes, Udp::new(), BootClock::default()).unwrap();
        let mut carrier = worker.carrier(inside, Offloads::default(), BootClock::default()).unwrap();
        // No peer for any of them, and a worker that does nothing.
        let lost = packet(A, B, b"lost");
        (0..1000).for_each(|_| machine.send(&VnetHdr::default(), &[IoSlice::new(&lost)]).unwrap());
        let now = BootClock::default().now().mono;
        while carrier.turn(now, false).unwrap() == Some(true) {}
        assert_eq!(carrier.tolls.discards[Discard::StagingFull as usize], 1000 - 256);
        assert_eq!(carrier.tolls.read, 1000);
        // In the end each is answered for.
        while worker.turn().unwrap() == crate::Park::Busy {}
        let asked = std::thread::spawn(move || handle.counters().unwrap());
        while !asked.is_finished() {
            worker.turn().unwrap();
        }
        let counts = asked.join().unwrap();
        assert_eq!((counts.get("no_route"), counts.get("staging_full")), (Some(256), Some(744)));
    }

    /// The keys that a carrier may use are gone with the peer, before whoever removed it is told.
    #[test]
    fn no_key_of_a_removed_peer_is_left_in_view() {
        let (mut a, mut b) = connected();
        a.give(&packet(A, B, b"x"));
        b.take();
        let remove = PeerUpdate { remove: true, ..peer(B, None) };
        a.handle.configure(DeviceUpdate { peers: vec![remove], ..Default::default() }).unwrap();
        for i in 0..200_u32 {
            a.give(&packet(A, B, &i.to_be_bytes()));
        }
        let gone = || a.count("no_route") == 200;
        assert!(
            (0..1000).any(|_| gone() || {
                sleep(Duration::from_millis(5));
                false
            }),
            "all are refused"
        );
        a.end();
        b.end();
    }

    #[test]
    fn a_tally_gives_what_was_counted_once_and_takes_back_what_was_not_sent() {
        let crew = Crew::new(Poller::new().unwrap().waker());
        let (tally, id, at) = (Tally::default(), PeerId(7), Instant::from_nanos(5));
        crew.tally(id, &tally, 100, at);
        crew.tally(id, &tally, 50, Instant::from_nanos(6));
        Crew::untally(&tally, 30);
        let mut noted = Vec::new();
        crew.noted(&mut noted);
        assert_eq!(noted, [id], "told once");
        assert_eq!((tally.take(), tally.take()), (Some((120, Instant::from_nanos(6))), None));
        crew.tally(id, &tally, 1, at);
        crew.noted(&mut noted);
        assert_eq!(noted, [id], "not before it is let go");
        tally.forget();
        crew.tally(id, &tally, 1, at);
        crew.noted(&mut noted);
        assert_eq!(noted, [id, id]);
    }
}
