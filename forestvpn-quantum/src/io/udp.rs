//! The UDP socket pair: batches of datagrams in and out, and what happens when the kernel refuses some.
//!
//! The worker owns it. Nothing that a peer or a network does may end its loop: what cannot be sent is counted
//! and dropped, as a network would.
#![expect(unsafe_code, reason = "std has neither recvmmsg nor sendmmsg")]

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::bind::{Pair, SocketBuffers};
use super::cmsg::{self, Control, NAME_LEN};
use super::fd::wait_writable;
use super::{Offloads, Poller, Queue, Ready, RxMeta, RxSlots, UdpCaps, UdpCounters, UdpQueue, UdpStatus};
use crate::batch::{Endpoint, Envelope, Train, Unsent, canonical};
use crate::event::GivenUp;

/// Most datagrams per system call.
const BATCH: usize = 64;
/// Datagrams that a read asks for at least; more when such reads came back full.
const FEWEST: usize = 2;
/// How long a full socket buffer is waited for before datagrams are dropped.
const FULL_WAIT: Duration = Duration::from_millis(1);
/// Datagrams per system call while the kernel joins them: trains of 64 KiB must not hold up the other direction.
const JOINED_BATCH: usize = 8;
/// Most bytes of one send: the payload limit of an IPv4 datagram.
const MAX_SEND: usize = 65_507;
/// Destinations remembered as not reachable by trains.
const MAX_UNCUT: usize = 64;
/// Lost sources kept until they are polled.
const MAX_LOST_SOURCES: usize = 64;

/// One message of a batch and all it points to.
struct Message {
    name: [u8; NAME_LEN],
    control: Control,
    parts: [libc::iovec; 2],
    /// To be sent: which train, and where in it.
    piece: Piece,
}

/// One datagram of a train, or several that follow each other.
#[derive(Clone, Copy, Default)]
struct Piece {
    owner: usize,
    at: usize,
    len: usize,
}

/// Memory for one system call, allocated once. The pointers in it are set anew before each call and never
/// used after it.
struct Batch {
    messages: [Message; BATCH],
    headers: [libc::mmsghdr; BATCH],
}

// SAFETY: what makes it not `Send` by itself are raw pointers that are dead outside of a call, see above.
unsafe impl Send for Batch {}

impl Batch {
    fn new() -> Box<Self> {
        let message = || Message {
            name: [0; NAME_LEN],
            control: Control([0; 128]),
            parts: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2],
            piece: Piece::default(),
        };
        // SAFETY: null pointers and zero lengths are a valid mmsghdr.
        let header = || unsafe { std::mem::zeroed() };
        Box::new(Self {
            messages: std::array::from_fn(|_| message()),
            headers: std::array::from_fn(|_| header()),
        })
    }
}

/// Open sockets, for other threads to send by.
#[derive(Clone, Debug)]
pub struct Sockets(Arc<Pair>);

/// The UDP sockets of one tunnel.
pub struct Udp {
    pair: Option<Arc<Pair>>,
    /// Which pair `segmenting` is about, when it was borrowed.
    borrowed: u64,
    rx: Box<Batch>,
    tx: Box<Batch>,
    /// For trains that have to go again one datagram at a time.
    again: Box<Batch>,
    offloads: Offloads,
    segmenting: Segmenting,
    /// Sockets worth a try; only what [`UdpQueue::stirred`] says takes one off.
    ready: Ready,
    /// How many datagrams the next read asks for: as many as came lately, and some more.
    asked: usize,
    /// The last read gave trains.
    joined: bool,
    /// Whose turn it is to be read first, so that a flood over one family does not shut out the other.
    six_first: bool,
    lost_sources: Vec<Endpoint>,
    counters: UdpCounters,
}

/// What is known about handing trains to the kernel.
#[derive(Debug)]
struct Segmenting {
    /// Most datagrams of one send; 1 = none is handed over whole.
    most: usize,
    /// Destinations whose path refused trains, while the sockets stay open.
    refused: Vec<SocketAddr>,
    /// What was given up and not told yet.
    untold: Vec<GivenUp>,
}

impl Segmenting {
    /// How many datagrams of the train may go in one send.
    fn per_send(&self, train: &Train<'_>) -> usize {
        if self.most == 1 || train.count() == 1 || self.refused.contains(&train.envelope.to.remote) {
            return 1;
        }
        (MAX_SEND / train.stride.max(1)).clamp(1, self.most)
    }

    /// The kernel refused a train to `to`.
    fn give_up(&mut self, errno: i32, to: SocketAddr) {
        // EIO: the way out has no checksum offload, whoever it leads to. Else only this path is too narrow; of very many such
        // paths the oldest is tried again.
        let told = if errno == libc::EIO {
            let before = std::mem::replace(&mut self.most, 1);
            (before != 1).then_some(GivenUp::Segmentation { errno })
        } else if !self.refused.contains(&to) {
            if self.refused.len() >= MAX_UNCUT {
                self.refused.remove(0);
            }
            self.refused.push(to);
            Some(GivenUp::SegmentationTowards { remote: to, errno })
        } else {
            None
        };
        if let Some(given_up) = told.filter(|_| self.untold.len() < MAX_UNCUT) {
            self.untold.push(given_up);
        }
    }
}

impl std::fmt::Debug for Udp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Udp").field("pair", &self.pair).finish_non_exhaustive()
    }
}

impl Default for Udp {
    fn default() -> Self {
        Self::new()
    }
}

impl Udp {
    /// Closed sockets that will use every offload the kernel does well.
    pub fn new() -> Self {
        Self::with_offloads(Offloads::default())
    }

    /// Closed sockets that will use the UDP offloads that are switched on and that the kernel does well.
    pub fn with_offloads(offloads: Offloads) -> Self {
        Self {
            pair: None,
            borrowed: 0,
            rx: Batch::new(),
            tx: Batch::new(),
            again: Batch::new(),
            offloads,
            segmenting: Segmenting {
                most: 1,
                refused: Vec::with_capacity(MAX_UNCUT),
                untold: Vec::with_capacity(MAX_UNCUT),
            },
            ready: Ready::ALL,
            asked: FEWEST,
            joined: false,
            six_first: false,
            lost_sources: Vec::with_capacity(MAX_LOST_SOURCES),
            counters: UdpCounters::default(),
        }
    }

    /// Sends by somebody else's sockets from here on; by none, when there are none. They stay open as long as anybody
    /// has them.
    pub(crate) fn borrow(&mut self, sockets: Option<&Sockets>) {
        self.pair = sockets.map(|Sockets(pair)| Arc::clone(pair));
        if let Some(pair) = self.pair.as_ref().filter(|pair| pair.serial != self.borrowed) {
            self.borrowed = pair.serial;
            self.segmenting.most = pair.segments;
            self.segmenting.refused.clear();
        }
    }

    /// What the kernel granted, while open: small values mean losses under bursts.
    pub fn buffers(&self) -> Option<SocketBuffers> {
        self.pair.as_ref().map(|pair| pair.buffers)
    }

    /// Whether IPv6 is open; without it datagrams to IPv6 endpoints are counted as lost.
    pub fn has_ipv6(&self) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.v6.is_some())
    }
}

impl UdpQueue for Udp {
    fn recv(&mut self, slots: &mut RxSlots) -> io::Result<usize> {
        slots.clear();
        let stirred = self.ready.udp4 || self.ready.udp6;
        let Some(pair) = self.pair.as_ref().filter(|_| stirred) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let Batch { messages, headers } = &mut *self.rx;
        let room = slots.count().min(if self.joined { JOINED_BATCH } else { self.asked });
        for (i, (message, header)) in messages.iter_mut().zip(headers.iter_mut()).enumerate().take(room) {
            let Some((near, far)) = slots.buffers(i) else { break };
            message.parts = [part(near), part(far)];
            let header = &mut header.msg_hdr;
            header.msg_name = (&raw mut message.name).cast();
            header.msg_namelen = NAME_LEN as _;
            header.msg_iov = (&raw mut message.parts).cast();
            header.msg_iovlen = 2;
            header.msg_control = (&raw mut message.control).cast();
            header.msg_controllen = size_of::<Control>() as _;
            header.msg_flags = 0;
        }

        let mut filled = 0;
        self.six_first = !self.six_first;
        let (four, six) = (pair.v4.as_ref(), pair.v6.as_ref());
        let (four, six) = (four.filter(|_| self.ready.udp4), six.filter(|_| self.ready.udp6));
        let order = if self.six_first { [six, four] } else { [four, six] };
        for socket in order.into_iter().flatten() {
            let Some(free) = headers.get_mut(filled..room).filter(|h| !h.is_empty()) else { break };
            filled += read(socket.as_fd(), free, &mut self.counters);
        }

        let mut joined = false;
        for (slot, (message, header)) in messages.iter().zip(headers.iter()).enumerate().take(filled) {
            let (len, flags) = (header.msg_len as usize, header.msg_hdr.msg_flags);
            //@ C-FMT-4
            if flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
                self.counters.truncated += 1;
                continue;
            }
            let Some(remote) = cmsg::decode(&message.name) else {
                self.counters.receive_errors += 1;
                continue;
            };
            #[allow(clippy::unnecessary_cast, reason = "u32 with musl")]
            let said = header.msg_hdr.msg_controllen as usize;
            let arrival = cmsg::parse(message.control.0.get(..said).unwrap_or_default());
            let from = Endpoint { remote, local: arrival.local };
            let stride = arrival.stride.unwrap_or(len);
            joined |= stride < len;
            self.counters.received += len.div_ceil(stride.max(1)).max(1) as u64;
            slots.push(RxMeta { slot, len, stride, from, ecn: arrival.ecn });
        }
        self.joined = joined;
        if filled == room {
            self.asked = (self.asked * 2).min(BATCH);
        } else if filled < self.asked / 4 {
            self.asked = (self.asked / 2).max(FEWEST);
        }
        if filled == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // All were cut short, say: more may wait, though none of these is of use.
        Ok(if filled == room { slots.count() } else { slots.filled() })
    }

    fn stirred(&mut self, ready: Ready) {
        self.ready = ready;
    }

    fn send(&mut self, trains: &[Train<'_>], unsent: &mut Unsent) -> io::Result<usize> {
        let Self { pair, tx, again, segmenting, lost_sources, counters, .. } = self;
        let mut sender =
            Sender { tx, again: Some(again), segmenting, used: 0, trains, lost_sources, counters, unsent };
        let mut socket = None;
        for (owner, train) in trains.iter().enumerate() {
            let Some(fd) = pair.as_ref().and_then(|pair| pair.towards(&train.envelope.to.remote)) else {
                sender.counters.lost_no_socket += train.count() as u64;
                sender.unsent.note(train, train.bytes.len());
                continue;
            };
            let change = socket.is_some_and(|open: BorrowedFd<'_>| open.as_raw_fd() != fd.as_raw_fd());
            if let Some(before) = socket.filter(|_| change) {
                sender.flush(before);
            }
            socket = Some(fd);
            // An empty datagram is one, too; it never comes from the core.
            let per_send = sender.segmenting.per_send(train).saturating_mul(train.stride).max(1);
            sender.push_all(fd, Piece { owner, at: 0, len: train.bytes.len() }, per_send);
        }
        if let Some(fd) = socket {
            sender.flush(fd);
        }
        Ok(trains.len())
    }

    fn caps(&self) -> UdpCaps {
        UdpCaps { gso_segments: self.segmenting.most, gro: self.pair.as_ref().is_some_and(|p| p.gro) }
    }

    fn open(&mut self, port: u16, fwmark: u32) -> io::Result<u16> {
        if let Some(pair) = &self.pair
            && port != 0
            && pair.port == port
        {
            pair.set_fwmark(fwmark)?;
            return Ok(port);
        }
        let pair = Pair::open(port, fwmark, self.offloads)?;
        let port = pair.port;
        self.segmenting.most = pair.segments;
        self.segmenting.refused.clear();
        self.joined = false;
        self.pair = Some(Arc::new(pair));
        Ok(port)
    }

    fn close(&mut self) {
        self.pair = None;
    }

    fn port(&self) -> Option<u16> {
        self.pair.as_ref().map(|pair| pair.port)
    }

    fn attach(&mut self, poller: &Poller) -> io::Result<()> {
        let Some(pair) = &self.pair else { return Ok(()) };
        let sockets = [(&pair.v4, Queue::Udp4), (&pair.v6, Queue::Udp6)];
        sockets.into_iter().try_for_each(|(socket, queue)| {
            socket.as_ref().map_or(Ok(()), |socket| poller.watch(socket.as_fd(), queue))
        })
    }

    fn poll_lost_source(&mut self) -> Option<Endpoint> {
        self.lost_sources.pop()
    }

    fn counters(&self) -> UdpCounters {
        self.counters
    }

    fn status(&self) -> Option<UdpStatus> {
        self.pair.as_ref().map(|pair| UdpStatus {
            ipv4: pair.v4.is_some(),
            ipv6: pair.v6.is_some(),
            buffers: pair.buffers,
            granted_segments: pair.segments,
            segments: self.segmenting.most,
            paths_without: self.segmenting.refused.len(),
            gro: pair.gro,
        })
    }

    fn sockets(&self) -> Option<Sockets> {
        self.pair.clone().map(Sockets)
    }

    fn poll_given_up(&mut self) -> Option<GivenUp> {
        let untold = &mut self.segmenting.untold;
        (!untold.is_empty()).then(|| untold.remove(0))
    }
}

fn part(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// One `recvmmsg` into `headers`, which the caller has just pointed at memory of its own. Gives how many
/// datagrams came; errors are those of single datagrams and are counted.
fn read(socket: BorrowedFd<'_>, headers: &mut [libc::mmsghdr], counters: &mut UdpCounters) -> usize {
    // An error that the network reported is taken off the socket by the call that returns it.
    for _ in 0..BATCH {
        counters.reads += 1;
        // SAFETY: every header in the slice points at a name, two iovecs and a control buffer that live in
        // `self.rx` and in `slots`, both borrowed by `Udp::recv` for the whole call and not moved meanwhile;
        // the lengths are theirs. The kernel writes only there and into the headers. No time-out is given.
        let result = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                headers.len() as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        if let Ok(n) = usize::try_from(result) {
            return n;
        }
        match io::Error::last_os_error().raw_os_error().unwrap_or(0) {
            libc::EAGAIN => return 0,
            libc::EINTR => {}
            _ => counters.receive_errors += 1,
        }
    }
    0
}

/// Messages on their way into one `sendmmsg`.
struct Sender<'a, 'b> {
    tx: &'a mut Batch,
    /// Where a refused train goes to be sent again; `None` while that is done.
    again: Option<&'a mut Batch>,
    segmenting: &'a mut Segmenting,
    used: usize,
    trains: &'a [Train<'b>],
    lost_sources: &'a mut Vec<Endpoint>,
    counters: &'a mut UdpCounters,
    unsent: &'a mut Unsent,
}

impl<'b> Sender<'_, 'b> {
    /// Adds what lies in `whole`, `per_send` bytes a message, and sends in between when the batch is full.
    fn push_all(&mut self, socket: BorrowedFd<'_>, whole: Piece, per_send: usize) {
        let Piece { owner, mut at, len } = whole;
        let end = at.saturating_add(len);
        while at < end {
            if self.used == BATCH {
                self.flush(socket);
            }
            let len = per_send.max(1).min(end - at);
            self.push(Piece { owner, at, len });
            at += len;
        }
    }

    /// What message `i` holds, and the train it belongs to.
    fn piece(&self, i: usize) -> Option<(&Train<'b>, Piece)> {
        let piece = self.tx.messages.get(i)?.piece;
        Some((self.trains.get(piece.owner)?, piece))
    }

    /// Adds one message.
    fn push(&mut self, piece: Piece) {
        let i = self.used;
        let Some(train) = self.trains.get(piece.owner) else { return };
        let Some(bytes) = train.bytes.get(piece.at..piece.at + piece.len) else { return };
        let whole = piece.len > train.stride;
        // Messages of one train share address and control messages, unless one is cut and the other is not.
        let before = i.checked_sub(1).and_then(|before| self.piece(before)).map(|(_, piece)| piece);
        let same = before.is_some_and(|b| b.owner == piece.owner && (b.len > train.stride) == whole);
        let known = same.then(|| self.tx.headers.get(i - 1).map(|h| h.msg_hdr)).flatten();
        let (Some(message), Some(header)) = (self.tx.messages.get_mut(i), self.tx.headers.get_mut(i)) else {
            return;
        };
        message.piece = piece;
        self.used += 1;
        // The kernel only reads it.
        let base = bytes.as_ptr().cast_mut().cast();
        message.parts[0] = libc::iovec { iov_base: base, iov_len: bytes.len() };
        let header = &mut header.msg_hdr;
        header.msg_iov = (&raw mut message.parts).cast();
        header.msg_iovlen = 1;
        if let Some(known) = known {
            // Address and control messages are those of the train's first datagram.
            (header.msg_name, header.msg_namelen) = (known.msg_name, known.msg_namelen);
            (header.msg_control, header.msg_controllen) = (known.msg_control, known.msg_controllen);
            return;
        }
        let mut envelope = train.envelope;
        envelope.to.remote = canonical(envelope.to.remote);
        envelope.to.local = envelope.to.local.filter(|_| !self.lost_sources.contains(&train.envelope.to));
        let (name, name_len) = cmsg::encode(envelope.to.remote);
        message.name = name;
        let segment = whole.then(|| u16::try_from(train.stride).ok()).flatten();
        let said = cmsg::build(&mut message.control, &envelope, segment);
        header.msg_name = (&raw mut message.name).cast();
        header.msg_namelen = name_len as _;
        header.msg_control = (&raw mut message.control).cast();
        header.msg_controllen = said as _;
    }

    /// Sends what was pushed, each datagram once; what cannot be sent is counted.
    fn flush(&mut self, socket: BorrowedFd<'_>) {
        let (mut at, mut waited, mut without_source) = (0, false, None::<Endpoint>);
        let mut retried = None;
        while let Some(rest) = self.tx.headers.get_mut(at..self.used).filter(|rest| !rest.is_empty()) {
            self.counters.writes += 1;
            // SAFETY: every header in the slice was set by `push` since the last flush: it points at an
            // iovec, a name and a control buffer in `self.tx`, and at a datagram in `self.trains`, all of
            // which live and stay where they are until `Udp::send` returns. The kernel writes only the
            // lengths in the headers.
            let result = unsafe {
                match rest {
                    // The lone message, which is most of them, by the shorter way. Its length does not matter.
                    [one] => libc::sendmsg(socket.as_raw_fd(), &raw const one.msg_hdr, libc::MSG_DONTWAIT)
                        .min(1) as libc::c_int,
                    _ => libc::sendmmsg(
                        socket.as_raw_fd(),
                        rest.as_mut_ptr(),
                        rest.len() as _,
                        libc::MSG_DONTWAIT as _,
                    ),
                }
            };
            if let Ok(sent) = usize::try_from(result)
                && sent > 0
            {
                if let Some(to) = without_source.filter(|_| self.endpoint(at) == without_source) {
                    self.note_lost_source(to);
                }
                self.counters.sent += self.datagrams(at, at + sent);
                at += sent;
                continue;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM if !waited => {
                    waited = true;
                    let _ = wait_writable(socket, FULL_WAIT);
                }
                libc::EAGAIN => {
                    self.counters.lost_full += self.lose(at, self.used);
                    break;
                }
                libc::ENOBUFS | libc::ENOMEM => {
                    self.counters.lost_full += self.lose(at, at + 1);
                    at += 1;
                }
                // A path too narrow is told from a local address that is gone by sending singly.
                code @ (libc::EIO | libc::EINVAL | libc::EMSGSIZE) if self.is_whole(at) => {
                    self.send_singly(socket, at, code);
                    at += 1;
                }
                //@ C-OUT-7
                libc::EINVAL | libc::ENETUNREACH | libc::EADDRNOTAVAIL | libc::EHOSTUNREACH
                    if self.endpoint(at) != without_source && self.drop_source(at) =>
                {
                    without_source = self.endpoint(at);
                }
                // Both have been seen to pass: once more, before a datagram is given up.
                libc::EIO | libc::EINVAL if retried != Some(at) => retried = Some(at),
                _ => {
                    self.counters.lost_refused += self.lose(at, at + 1);
                    at += 1;
                }
            }
        }
        self.used = 0;
    }

    /// How many datagrams messages `from..to` hold.
    fn datagrams(&self, from: usize, to: usize) -> u64 {
        let of =
            |i| self.piece(i).map(|(train, piece)| piece.len.div_ceil(train.stride.max(1)).max(1) as u64);
        (from..to).filter_map(of).sum()
    }

    /// Messages `from..to` are given up: their peers are told. Gives how many datagrams that were.
    fn lose(&mut self, from: usize, to: usize) -> u64 {
        for i in from..to {
            let Some(Piece { owner, len, .. }) = self.tx.messages.get(i).map(|message| message.piece) else {
                break;
            };
            if let Some(train) = self.trains.get(owner) {
                self.unsent.note(train, len);
            }
        }
        self.datagrams(from, to)
    }

    /// Does message `at` ask the kernel to cut?
    fn is_whole(&self, at: usize) -> bool {
        self.again.is_some() && self.piece(at).is_some_and(|(train, piece)| piece.len > train.stride)
    }

    /// The kernel refused to cut message `at`: the same datagrams go one by one, in order, before the next
    /// message does.
    fn send_singly(&mut self, socket: BorrowedFd<'_>, at: usize, error: i32) {
        let Some((&train, piece)) = self.piece(at) else { return };
        let sources_lost = self.counters.source_lost;
        let Some(again) = self.again.take() else { return };
        let mut single = Sender {
            tx: &mut *again,
            again: None,
            segmenting: self.segmenting,
            used: 0,
            trains: self.trains,
            lost_sources: self.lost_sources,
            counters: self.counters,
            unsent: self.unsent,
        };
        single.push_all(socket, piece, train.stride);
        single.flush(socket);
        self.again = Some(again);
        // Trains are not at fault when the datagrams only went without their local address.
        if self.counters.source_lost == sources_lost {
            self.counters.gso_fallbacks += 1;
            self.segmenting.give_up(error, train.envelope.to.remote);
        }
    }

    fn endpoint(&self, message: usize) -> Option<Endpoint> {
        self.piece(message).map(|(train, _)| train.envelope.to)
    }

    /// Takes the local address off the messages from `at` on that go to the same endpoint. False when there
    /// is none.
    fn drop_source(&mut self, at: usize) -> bool {
        let Some(to) = self.endpoint(at).filter(|to| to.local.is_some()) else { return false };
        for i in at..self.used {
            let Some((train, piece)) = self.piece(i).filter(|(train, _)| train.envelope.to == to) else {
                continue;
            };
            let envelope = Envelope { to: Endpoint { local: None, ..to }, ..train.envelope };
            let whole = piece.len > train.stride;
            let segment = whole.then(|| u16::try_from(train.stride).ok()).flatten();
            if let (Some(message), Some(header)) = (self.tx.messages.get_mut(i), self.tx.headers.get_mut(i)) {
                let said = cmsg::build(&mut message.control, &envelope, segment);
                header.msg_hdr.msg_control = (&raw mut message.control).cast();
                header.msg_hdr.msg_controllen = said as _;
            }
        }
        true
    }

    /// It went without the local address: that address is no good any more.
    fn note_lost_source(&mut self, to: Endpoint) {
        if self.lost_sources.len() < MAX_LOST_SOURCES && !self.lost_sources.contains(&to) {
            self.lost_sources.push(to);
            self.counters.source_lost += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr, UdpSocket};

    use super::*;
    use crate::batch::{Ecn, LocalAddr};
    use crate::io::namespace::{in_namespace, run, skip};

    fn opened() -> (Udp, u16) {
        let mut udp = Udp::new();
        let port = udp.open(0, 0).unwrap();
        (udp, port)
    }

    fn peer(addr: &str) -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind(addr).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let addr = socket.local_addr().unwrap();
        (socket, addr)
    }

    fn train(to: SocketAddr, stride: usize, bytes: &[u8]) -> Train<'_> {
        Train { envelope: Envelope::new(Endpoint::new(to)), stride, bytes }
    }

    /// Loopback delivers at once, yet on a busy machine not always before the next line.
    fn recv(udp: &mut Udp, slots: &mut RxSlots) -> usize {
        for _ in 0..500 {
            match udp.recv(slots) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(10))
                }
                other => return other.unwrap(),
            }
        }
        panic!("nothing came within 5 s");
    }

    fn heard(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
        let mut buf = vec![0; 70_000];
        let (len, from) = socket.recv_from(&mut buf).unwrap();
        buf.truncate(len);
        (buf, from)
    }

    /// Without IPv6 there is nothing to show about it.
    fn families() -> Vec<(&'static str, &'static str)> {
        let mut families = vec![("127.0.0.1:0", "127.0.0.2")];
        if UdpSocket::bind("[::1]:0").is_ok() {
            families.push(("[::1]:0", "::1"));
        } else {
            skip("the IPv6 half: this machine has no IPv6");
        }
        families
    }

    #[test]
    fn both_families_share_the_port_and_tell_who_sent_and_where_it_arrived() {
        let (mut udp, port) = opened();
        let mut slots = RxSlots::new(8);
        for (at, target) in families() {
            let (socket, addr) = peer(at);
            let target: IpAddr = target.parse().unwrap();
            socket.send_to(b"hello", (target, port)).unwrap();
            assert_eq!(recv(&mut udp, &mut slots), 1);
            let got = slots.received(0).unwrap();
            assert_eq!((&*got.bytes, got.from.remote), (&b"hello"[..], addr));
            assert_eq!(got.from.local.map(|l| l.ip), Some(target));
        }
        assert_eq!(udp.recv(&mut slots).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    //@test C-OUT-7
    fn answer_leaves_from_the_address_that_was_reached() {
        let (mut udp, port) = opened();
        let mut slots = RxSlots::new(8);
        let (socket, _) = peer("127.0.0.1:0");
        socket.send_to(b"hello", ("127.0.0.2", port)).unwrap();
        recv(&mut udp, &mut slots);
        let from = slots.received(0).unwrap().from;
        udp.send(&[Train { envelope: Envelope::new(from), stride: 3, bytes: b"yes" }], &mut Unsent::new())
            .unwrap();
        assert_eq!(heard(&socket), (b"yes".to_vec(), ("127.0.0.2".parse::<IpAddr>().unwrap(), port).into()));
        assert_eq!(udp.poll_lost_source(), None);
    }

    #[test]
    //@test C-OUT-7
    fn source_that_is_no_longer_ours_is_left_out_and_reported_once() {
        let (mut udp, port) = opened();
        let (socket, addr) = peer("127.0.0.1:0");
        let gone = LocalAddr { ip: "203.0.113.9".parse().unwrap(), ifindex: 0 };
        let to = Endpoint { local: Some(gone), ..Endpoint::new(addr) };
        udp.send(&[Train { envelope: Envelope::new(to), stride: 1, bytes: b"abc" }], &mut Unsent::new())
            .unwrap();
        for expected in [b"a", b"b", b"c"] {
            let from: SocketAddr = ("127.0.0.1".parse::<IpAddr>().unwrap(), port).into();
            assert_eq!(heard(&socket), (expected.to_vec(), from));
        }
        assert_eq!(udp.poll_lost_source(), Some(to));
        assert_eq!(udp.poll_lost_source(), None);
        assert_eq!((udp.counters().sent, udp.counters().source_lost), (3, 1));
        // Trains are not at fault.
        assert!(udp.segmenting.refused.is_empty() && udp.counters().gso_fallbacks == 0);
    }

    #[test]
    fn ecn_bits_cross_the_wire_in_both_families() {
        let (mut a, _) = opened();
        let (mut b, port) = opened();
        let mut slots = RxSlots::new(8);
        for (_, to) in families() {
            let to = Endpoint::new((to.parse::<IpAddr>().unwrap(), port).into());
            for ecn in [Ecn::Ect0, Ecn::Ce, Ecn::NotEct] {
                let envelope = Envelope { tos: ecn as u8, ..Envelope::new(to) };
                a.send(&[Train { envelope, stride: 1, bytes: b"x" }], &mut Unsent::new()).unwrap();
                recv(&mut b, &mut slots);
                assert_eq!(slots.received(0).unwrap().ecn, ecn);
            }
        }
    }

    #[test]
    fn trains_of_any_length_to_both_families_arrive_whole_and_in_order() {
        let (mut udp, _) = opened();
        let (four, four_addr) = peer("127.0.0.1:0");
        let (six, six_addr) = peer(families().last().unwrap().0);
        let bytes: Vec<u8> = (0..201).collect();
        let trains = [train(four_addr, 2, &bytes), train(six_addr, 50, &bytes), train(four_addr, 7, b"end")];
        assert_eq!(udp.send(&trains, &mut Unsent::new()).unwrap(), 3);
        for chunk in bytes.chunks(2).chain([&b"end"[..]]) {
            assert_eq!(heard(&four).0, chunk);
        }
        for chunk in bytes.chunks(50) {
            assert_eq!(heard(&six).0, chunk);
        }
        assert_eq!(udp.counters().sent, 101 + 5 + 1);
        assert_eq!(udp.counters().writes, 3);
        assert_eq!(udp.counters().gso_fallbacks, 0);
    }

    #[test]
    fn trains_cross_as_trains_or_as_single_datagrams_and_nobody_can_tell() {
        for (sending, receiving) in [
            (Offloads::default(), Offloads::default()),
            (Offloads::default(), Offloads::NONE),
            (Offloads::NONE, Offloads::default()),
        ] {
            let (mut a, mut b) = (Udp::with_offloads(sending), Udp::with_offloads(receiving));
            a.open(0, 0).unwrap();
            let port = b.open(0, 0).unwrap();
            let bytes: Vec<u8> = (0..1452 * 40 + 700).map(|i| (i % 253) as u8).collect();
            let to = ("127.0.0.1".parse::<IpAddr>().unwrap(), port).into();
            assert_eq!(a.send(&[train(to, 1452, &bytes)], &mut Unsent::new()).unwrap(), 1);
            let mut slots = RxSlots::new(64);
            let mut heard = Vec::new();
            while heard.len() < 41 {
                recv(&mut b, &mut slots);
                for i in 0..slots.filled() {
                    let rx = slots.received(i).unwrap();
                    heard.extend(rx.bytes.chunks(rx.stride).map(<[u8]>::to_vec));
                }
            }
            let sent: Vec<Vec<u8>> = bytes.chunks(1452).map(<[u8]>::to_vec).collect();
            assert_eq!(heard, sent, "{sending:?} to {receiving:?}");
            assert_eq!((a.counters().sent, b.counters().received), (41, 41));
        }
    }

    #[test]
    fn a_refused_train_goes_again_one_by_one_and_only_its_destination_is_remembered() {
        let mut s = Segmenting { most: 64, refused: Vec::new(), untold: Vec::new() };
        let (near, far): (SocketAddr, SocketAddr) =
            ("192.0.2.1:1".parse().unwrap(), "192.0.2.2:1".parse().unwrap());
        let bytes = [0; 3000];
        s.give_up(libc::EINVAL, far);
        assert_eq!(s.per_send(&train(far, 1000, &bytes)), 1);
        assert_eq!(s.per_send(&train(near, 1000, &bytes)), 64);
        assert_eq!(s.per_send(&train(near, 1452, &bytes)), 45, "what fits one IPv4 datagram");
        s.give_up(libc::EIO, near);
        assert_eq!(s.per_send(&train(near, 1000, &bytes)), 1, "no checksum offload: for all");
        // Trains that were under way meanwhile.
        s.give_up(libc::EINVAL, far);
        s.give_up(libc::EIO, near);
        let towards = GivenUp::SegmentationTowards { remote: far, errno: libc::EINVAL };
        assert_eq!(s.untold, [towards, GivenUp::Segmentation { errno: libc::EIO }], "each is told once");
    }

    #[test]
    fn many_narrow_paths_do_not_end_trains_for_the_others() {
        let mut s = Segmenting { most: 64, refused: Vec::new(), untold: Vec::new() };
        let path = |n: u16| SocketAddr::from(([192, 0, 2, 1], n));
        (1..=200).for_each(|n| s.give_up(libc::EMSGSIZE, path(n)));
        let bytes = [0; 3000];
        assert_eq!(s.per_send(&train(path(200), 1000, &bytes)), 1);
        assert_eq!(s.per_send(&train(path(1), 1000, &bytes)), 64, "the oldest is tried again");
        assert_eq!((s.most, s.refused.len()), (64, MAX_UNCUT));
    }

    /// The path is at fault, and not the local address, which is kept.
    #[test]
    //@test C-OUT-7
    fn a_train_over_a_narrow_path_is_sent_singly_from_the_same_address() {
        in_namespace(|| {
            run("ip link set lo mtu 1300 up");
            let (mut udp, port) = opened();
            if udp.caps().gso_segments == 1 {
                return skip("this kernel cuts no trains");
            }
            let (socket, addr) = peer("127.0.0.1:0");
            let second = LocalAddr { ip: "127.0.0.2".parse().unwrap(), ifindex: 0 };
            let to = Endpoint { local: Some(second), ..Endpoint::new(addr) };
            let bytes: Vec<u8> = (0..3 * 1400_u32).map(|i| (i / 1400) as u8).collect();
            for round in 1..=2 {
                let train = Train { envelope: Envelope::new(to), stride: 1400, bytes: &bytes };
                udp.send(&[train], &mut Unsent::new()).unwrap();
                for n in 0..3 {
                    let (heard, from) = heard(&socket);
                    assert_eq!((heard, from), (vec![n; 1400], (second.ip, port).into()), "round {round}");
                }
            }
            assert_eq!(udp.poll_lost_source(), None);
            let counters = udp.counters();
            assert_eq!((counters.gso_fallbacks, counters.source_lost, counters.sent), (1, 0, 6));
        });
    }

    #[test]
    //@test C-FMT-4
    fn longest_datagram_arrives_whole_and_one_beyond_the_slot_is_dropped_and_counted() {
        let (mut udp, port) = opened();
        let (socket, _) = peer("127.0.0.1:0");
        let long: Vec<u8> = (0..65_507).map(|i| (i % 251) as u8).collect();
        let mut slots = RxSlots::new(4);
        socket.send_to(&long, ("127.0.0.1", port)).unwrap();
        recv(&mut udp, &mut slots);
        assert_eq!(slots.received(0).unwrap().bytes, long);

        let mut short = RxSlots::with_whole(4, 3000);
        socket.send_to(&long[..3001], ("127.0.0.1", port)).unwrap();
        socket.send_to(b"next", ("127.0.0.1", port)).unwrap();
        while short.filled() == 0 {
            recv(&mut udp, &mut short);
        }
        assert_eq!(short.received(0).unwrap().bytes, b"next");
        assert_eq!(udp.counters().truncated, 1);
    }

    #[test]
    fn port_in_use_is_refused_and_the_old_sockets_go_on() {
        let (mut udp, port) = opened();
        let (socket, taken) = peer("0.0.0.0:0");
        let error = udp.open(taken.port(), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EADDRINUSE));
        assert_eq!(udp.port(), Some(port));
        socket.send_to(b"still here", ("127.0.0.1", port)).unwrap();
        assert_eq!(recv(&mut udp, &mut RxSlots::new(8)), 1);
    }

    #[test]
    fn port_taken_on_ipv6_only_is_refused_as_well() {
        let (mut udp, _) = opened();
        let (_socket, taken) = peer(families().last().unwrap().0);
        assert_eq!(udp.open(taken.port(), 0).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn same_port_again_keeps_the_socket_and_what_waits_in_it() {
        let (mut udp, port) = opened();
        let (socket, _) = peer("127.0.0.1:0");
        socket.send_to(b"waiting", ("127.0.0.1", port)).unwrap();
        assert_eq!(udp.open(port, 0).unwrap(), port);
        assert_eq!(recv(&mut udp, &mut RxSlots::new(8)), 1);
        assert_ne!(udp.open(0, 0).unwrap(), port);
    }

    #[test]
    fn closed_sockets_and_unreachable_peers_are_counted_and_end_nothing() {
        let mut udp = Udp::new();
        let nobody: SocketAddr = "127.0.0.1:9".parse().unwrap();
        assert_eq!(udp.send(&[train(nobody, 1, b"ab")], &mut Unsent::new()).unwrap(), 1);
        assert_eq!(udp.counters().lost_no_socket, 2);
        assert!(udp.recv(&mut RxSlots::new(1)).is_err());

        udp.open(0, 0).unwrap();
        let mut slots = RxSlots::new(1);
        for _ in 0..10 {
            // ICMP port unreachable comes back each time.
            assert_eq!(udp.send(&[train(nobody, 1, b"a")], &mut Unsent::new()).unwrap(), 1);
            assert_eq!(udp.recv(&mut slots).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        let zero: SocketAddr = "127.0.0.1:0".parse().unwrap();
        udp.send(&[train(zero, 1, b"a"), train(nobody, 65_508, &[0; 65_508])], &mut Unsent::new()).unwrap();
        assert_eq!(udp.counters().lost_refused, 2);
    }

    #[test]
    fn granted_buffers_are_reported() {
        let (udp, _) = opened();
        let buffers = udp.buffers().unwrap();
        assert!(buffers.receive >= 100_000 && buffers.send >= 100_000, "{buffers:?}");
        assert_eq!(Udp::new().buffers(), None);
    }

    #[test]
    //@test C-OUT-8
    fn fwmark_is_on_both_sockets_survives_a_new_port_and_goes_with_zero() {
        in_namespace(|| {
            let marks = |udp: &Udp| {
                let pair = udp.pair.as_ref().unwrap();
                [&pair.v4, &pair.v6].map(|s| s.as_ref().unwrap().mark().unwrap())
            };
            let mut udp = Udp::new();
            let port = udp.open(0, 0xca6c).unwrap();
            assert_eq!(marks(&udp), [0xca6c; 2]);
            udp.open(port, 7).unwrap();
            assert_eq!(marks(&udp), [7; 2]);
            udp.open(0, 7).unwrap();
            assert_eq!(marks(&udp), [7; 2]);
            udp.open(udp.port().unwrap(), 0).unwrap();
            assert_eq!(marks(&udp), [0; 2]);
        });
    }

    #[test]
    //@test C-OUT-5
    fn datagram_beyond_the_mtu_is_fragmented_and_not_refused() {
        in_namespace(|| {
            run("ip link set lo mtu 1500");
            let (mut a, _) = opened();
            let (mut b, port) = opened();
            let mut slots = RxSlots::new(8);
            let bytes: Vec<u8> = (0..34_768).map(|i| (i % 251) as u8).collect();
            for (_, to) in families() {
                let to = (to.parse::<IpAddr>().unwrap(), port).into();
                a.send(&[train(to, bytes.len(), &bytes)], &mut Unsent::new()).unwrap();
                recv(&mut b, &mut slots);
                assert_eq!(slots.received(0).unwrap().bytes, bytes);
            }
            assert_eq!(a.counters().lost_refused, 0);
        });
    }

    #[test]
    fn network_that_is_unreachable_for_a_while_costs_only_what_was_sent_meanwhile() {
        in_namespace(|| {
            let (mut a, _) = opened();
            let (mut b, port) = opened();
            let to = SocketAddr::from(([10, 7, 0, 1], port));
            let mut slots = RxSlots::new(8);
            a.send(&[train(to, 1, b"abc")], &mut Unsent::new()).unwrap();
            assert_eq!((a.counters().sent, a.counters().lost_refused), (0, 3));
            run("ip addr add 10.7.0.1/32 dev lo");
            a.send(&[train(to, 1, b"d")], &mut Unsent::new()).unwrap();
            recv(&mut b, &mut slots);
            assert_eq!(slots.received(0).unwrap().bytes, b"d");
        });
    }

    #[test]
    fn without_ipv6_addresses_ipv4_works_and_ipv6_is_counted() {
        in_namespace(|| {
            // Of the namespace of the thread that writes. No such file: no IPv6 in this kernel at all.
            let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
            let (mut a, _) = opened();
            let (mut b, port) = opened();
            let mut slots = RxSlots::new(8);
            let six: SocketAddr = ("2001:db8::1".parse::<IpAddr>().unwrap(), port).into();
            let four: SocketAddr = ("127.0.0.1".parse::<IpAddr>().unwrap(), port).into();
            a.send(&[train(six, 1, b"x"), train(four, 1, b"y")], &mut Unsent::new()).unwrap();
            recv(&mut b, &mut slots);
            assert_eq!(slots.received(0).unwrap().bytes, b"y");
            assert_eq!(a.counters().lost_refused + a.counters().lost_no_socket, 1);
        });
    }

    #[test]
    fn pair_without_an_ipv6_socket_counts_what_goes_there() {
        let (mut udp, _) = opened();
        Arc::get_mut(udp.pair.as_mut().unwrap()).unwrap().v6 = None;
        assert!(!udp.has_ipv6());
        let (four, addr) = peer("127.0.0.1:0");
        let six: SocketAddr = "[2001:db8::1]:1".parse().unwrap();
        assert_eq!(udp.send(&[train(six, 1, b"xx"), train(addr, 1, b"y")], &mut Unsent::new()).unwrap(), 2);
        assert_eq!(heard(&four).0, b"y");
        assert_eq!(udp.counters().lost_no_socket, 2);
    }
}
