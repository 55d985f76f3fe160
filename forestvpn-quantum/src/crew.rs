//! What the threads of one tunnel share when there are several. The worker's owns the device; the others, its carriers,
//! only take packets from the TUN device to the network and ask nobody on the way:
//!
//! ```text
//!             worker                          carrier
//!   view      writes: routes, keys, sockets   reads, once per turn; holds no key between turns
//!   tallies   adds them to the peers          counts bytes, leaves the time
//!   post      takes and treats                whatever is not plain: no key, no peer, packets waiting
//! ```
//!
//! A packet never overtakes one before it: while the worker has packets of a peer that a carrier could not send, that
//! peer's packets all go by the post; and a key is shown only when no packet waits for it and those that did are sent.

#![expect(
    clippy::disallowed_types,
    reason = "between threads: the view is taken once a turn, the rest is rare; one thread meets none of it"
)]

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use mio::Waker;

use crate::batch::Endpoint;
use crate::device::ways::RouteEdit;
use crate::device::{Device, PeerId};
use crate::event::{Discard, GivenUp};
use crate::io::{Sockets, UdpCounters};
use crate::mss::Mss;
use crate::offload::VnetHdr;
use crate::route::Routes;
use crate::session::SealKey;
use crate::time::{Instant, Now};

/// Packets that may wait in the post, and their bytes: more are dropped and counted.
const MAX_POSTED: usize = 256;
const MAX_POSTED_BYTES: usize = 1 << 20;
/// Notices of a kind that may wait.
const MAX_NOTICES: usize = 64;

/// The way of one peer's packets, and what went there.
#[derive(Default)]
pub(crate) struct Way {
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) key: Option<Arc<SealKey>>,
    pub(crate) tally: Tally,
}

/// What carriers sent to a peer and the worker does not know yet.
#[derive(Default)]
pub(crate) struct Tally {
    bytes: AtomicI64,
    /// When the last one was sent, in nanoseconds; 0: nothing since it was looked at.
    at: AtomicU64,
    /// The worker was told to look.
    noted: AtomicBool,
    /// Packets in the post, and those that the worker has taken but not sent yet.
    posted: AtomicUsize,
}

impl Tally {
    /// Must packets go by the post, behind others?
    pub(crate) fn is_posted(&self) -> bool {
        self.posted.load(Ordering::Acquire) > 0
    }

    /// Takes what was counted.
    pub(crate) fn take(&self) -> Option<(i64, Instant)> {
        let at = self.at.swap(0, Ordering::Relaxed);
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        (at != 0 || bytes != 0).then(|| (bytes, Instant::from_nanos(at)))
    }

    /// From here on the worker has to be told again.
    pub(crate) fn forget(&self) {
        self.noted.store(false, Ordering::SeqCst);
    }
}

/// What a carrier has to know, as of now.
pub(crate) struct View {
    pub(crate) up: bool,
    pub(crate) stopped: bool,
    pub(crate) mtu: u16,
    pub(crate) mss: Mss,
    pub(crate) routes: Routes,
    /// Counts changes of `routes`.
    pub(crate) edition: u64,
    pub(crate) ways: HashMap<PeerId, Way>,
    pub(crate) sockets: Option<Sockets>,
}

/// A packet that a carrier could not send.
pub(crate) struct Posted {
    pub(crate) hdr: VnetHdr,
    pub(crate) bytes: Vec<u8>,
    pub(crate) peer: Option<PeerId>,
}

/// From the carriers to the worker.
#[derive(Default)]
struct Post {
    packets: VecDeque<Posted>,
    bytes: usize,
    noted: Vec<PeerId>,
    lost_sources: Vec<Endpoint>,
    given_up: Vec<GivenUp>,
}

/// What a carrier counted, in packets unless said otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tolls {
    pub(crate) read: u64,
    pub(crate) read_errors: u64,
    pub(crate) discards: [u64; Discard::COUNT],
    /// Datagrams that the sockets did not take.
    pub(crate) lost: u64,
    pub(crate) udp: UdpCounters,
    /// Most datagrams of one send now; 0 while the sockets are closed.
    pub(crate) segments: usize,
}

impl Tolls {
    pub(crate) fn discard(&mut self, why: Discard, count: usize) {
        if let Some(n) = self.discards.get_mut(why as usize) {
            *n = n.saturating_add(count as u64);
        }
    }
}

/// What the threads of a tunnel share.
pub(crate) struct Crew {
    view: RwLock<View>,
    post: Mutex<Post>,
    /// Something is in the post.
    stirred: AtomicBool,
    /// A carrier found that the interface is gone.
    gone: AtomicBool,
    /// Wakes the worker.
    worker: Arc<Waker>,
    carriers: Mutex<Vec<Arc<Waker>>>,
    tolls: Mutex<Vec<Tolls>>,
}

/// Nobody panics while holding one of these locks; if somebody did, packets would still be worth more.
fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Crew {
    pub(crate) fn new(worker: Arc<Waker>) -> Self {
        let view = View {
            up: false,
            stopped: false,
            mtu: 0,
            mss: Mss::Off,
            routes: Routes::new(),
            edition: 0,
            ways: HashMap::new(),
            sockets: None,
        };
        Self {
            view: RwLock::new(view),
            post: Mutex::default(),
            stirred: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            worker,
            carriers: Mutex::default(),
            tolls: Mutex::default(),
        }
    }

    // -- for carriers ---------------------------------------------------------------------------------

    /// Takes on a carrier that `waker` wakes; gives its number.
    pub(crate) fn join(&self, waker: Arc<Waker>) -> usize {
        locked(&self.carriers).push(waker);
        let mut tolls = locked(&self.tolls);
        tolls.push(Tolls::default());
        tolls.len() - 1
    }

    /// How things are. Nothing changes before it is given back, so that shall be soon.
    pub(crate) fn view(&self) -> RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The packet goes on by the worker's hands; `false`: too many do already.
    pub(crate) fn post(&self, hdr: VnetHdr, bytes: &[u8], peer: Option<(PeerId, &Tally)>) -> bool {
        let mut post = locked(&self.post);
        if post.packets.len() >= MAX_POSTED || post.bytes + bytes.len() > MAX_POSTED_BYTES {
            return false;
        }
        if let Some((_, tally)) = peer {
            tally.posted.fetch_add(1, Ordering::AcqRel);
        }
        post.bytes += bytes.len();
        post.packets.push_back(Posted { hdr, bytes: bytes.to_vec(), peer: peer.map(|(id, _)| id) });
        drop(post);
        self.stir();
        true
    }

    /// `bytes` more went to a peer.
    pub(crate) fn tally(&self, id: PeerId, tally: &Tally, bytes: usize, now: Instant) {
        tally.bytes.fetch_add(bytes as i64, Ordering::Relaxed);
        tally.at.store(now.as_nanos(), Ordering::Relaxed);
        if !tally.noted.swap(true, Ordering::SeqCst) {
            locked(&self.post).noted.push(id);
            self.stir();
        }
    }

    /// `bytes` of those did not go after all.
    pub(crate) fn untally(tally: &Tally, bytes: u64) {
        tally.bytes.fetch_sub(bytes as i64, Ordering::Relaxed);
    }

    pub(crate) fn lost_source(&self, endpoint: Endpoint) {
        let mut post = locked(&self.post);
        if post.lost_sources.len() < MAX_NOTICES {
            post.lost_sources.push(endpoint);
        }
        drop(post);
        self.stir();
    }

    pub(crate) fn given_up(&self, what: GivenUp) {
        let mut post = locked(&self.post);
        if post.given_up.len() < MAX_NOTICES {
            post.given_up.push(what);
        }
        drop(post);
        self.stir();
    }

    /// The interface was deleted.
    pub(crate) fn tun_gone(&self) {
        self.gone.store(true, Ordering::Release);
        self.stir();
    }

    pub(crate) fn count(&self, number: usize, tolls: Tolls) {
        if let Some(place) = locked(&self.tolls).get_mut(number) {
            *place = tolls;
        }
    }

    fn stir(&self) {
        if !self.stirred.swap(true, Ordering::AcqRel) {
            // Cannot fail but for a full counter, and then the worker is awake.
            let _ = self.worker.wake();
        }
    }

    // -- for the worker -------------------------------------------------------------------------------

    /// There is more in the post than was taken out.
    pub(crate) fn again(&self) {
        self.stir();
    }

    /// Whether something may wait; one atomic read when nothing does.
    pub(crate) fn is_stirred(&self) -> bool {
        self.stirred.load(Ordering::Relaxed) && self.stirred.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The oldest packet of the post.
    pub(crate) fn next_packet(&self) -> Option<Posted> {
        let mut post = locked(&self.post);
        let packet = post.packets.pop_front()?;
        post.bytes = post.bytes.saturating_sub(packet.bytes.len());
        Some(packet)
    }

    /// A packet of this peer that was posted is sent, or waits where no other overtakes it.
    pub(crate) fn treated(&self, id: PeerId) {
        if let Some(way) = self.view().ways.get(&id) {
            way.tally.posted.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Peers to which something was sent since nothing was.
    pub(crate) fn noted(&self, into: &mut Vec<PeerId>) {
        into.append(&mut locked(&self.post).noted);
    }

    pub(crate) fn next_lost_source(&self) -> Option<Endpoint> {
        locked(&self.post).lost_sources.pop()
    }

    pub(crate) fn next_given_up(&self) -> Option<GivenUp> {
        locked(&self.post).given_up.pop()
    }

    /// Has every carrier see how things are now, and returns when none works by the former state.
    pub(crate) fn show(&self, device: &mut Device, sockets: Option<Sockets>, now: Now) {
        let mut view = self.write();
        view.up = device.is_up();
        (view.mtu, view.mss) = (device.mtu(), device.mss());
        view.sockets = sockets;
        view.follow(device, now);
        drop(view);
        self.wake_all();
    }

    /// As [`Crew::show`], for what changed of routes, endpoints and keys only. Waits for the carriers only if something did.
    pub(crate) fn follow(&self, device: &mut Device, now: Now) {
        if device.changes().routes.is_empty() && !self.differs(device, now) {
            device.changes().clear();
            return;
        }
        self.write().follow(device, now);
    }

    fn differs(&self, device: &mut Device, now: Now) -> bool {
        let view = self.view();
        let (mut differs, mut i) = (false, 0);
        while let Some(id) = device.changes().touched.get(i).copied() {
            i += 1;
            let (shown, way) = (view.ways.get(&id), device.way(id, now.mono));
            differs |= match (shown, way) {
                (Some(shown), Some(way)) => {
                    shown.endpoint != way.endpoint || !same(shown.key.as_ref(), way.key)
                }
                (None, None) => false,
                _ => true,
            };
        }
        differs
    }

    /// Tells the carriers to end.
    pub(crate) fn stop(&self) {
        let mut view = self.write();
        view.stopped = true;
        view.ways.clear();
        view.sockets = None;
        drop(view);
        self.wake_all();
    }

    pub(crate) fn tolls(&self) -> Vec<Tolls> {
        locked(&self.tolls).clone()
    }

    fn wake_all(&self) {
        for carrier in locked(&self.carriers).iter() {
            let _ = carrier.wake();
        }
    }

    fn write(&self) -> RwLockWriteGuard<'_, View> {
        self.view.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").finish_non_exhaustive()
    }
}

impl View {
    fn follow(&mut self, device: &mut Device, now: Now) {
        let changes = device.changes();
        for edit in &changes.routes {
            self.edition += 1;
            match *edit {
                RouteEdit::Insert(net, id) => drop(self.routes.insert(net, id)),
                RouteEdit::Remove(net, id) => drop(self.routes.remove(net, id)),
                RouteEdit::RemovePeer(id) => self.routes.remove_peer(id),
            }
        }
        let touched = core::mem::take(&mut changes.touched);
        changes.clear();
        for id in touched {
            let Some(way) = device.way(id, now.mono) else {
                self.ways.remove(&id);
                continue;
            };
            let shown = self.ways.entry(id).or_default();
            shown.endpoint = way.endpoint;
            shown.key = way.key.cloned();
        }
    }
}

fn same(a: Option<&Arc<SealKey>>, b: Option<&Arc<SealKey>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}
