//! The worker's outbox: one stretch of memory where datagrams are sealed at the address they are sent from.
//!
//! Neighbours for one endpoint with equal sizes grow into one [`Train`], which a socket can send as one. When
//! the memory is full it is sent and reused, in the midst of whatever fills it: nothing is lost for lack of
//! room.

use core::net::{Ipv4Addr, SocketAddr};
use std::io;

use crate::batch::{Endpoint, Envelope, Outbox, Sealing, Train, Unsent};
use crate::device::PeerId;
use crate::io::UdpQueue;
use crate::session::Unsealed;

/// Two of the longest datagrams there are: 65 535 bytes padded, and 32 around them.
const CAPACITY: usize = 2 * (65_536 + 32);
/// Trains kept before they are sent.
const MAX_TRAINS: usize = 64;
/// Trains handed to the socket at once; few, as a lone packet pays for them.
const ROW: usize = 8;
/// Most datagrams of one train, as UDP_SEGMENT has it on every kernel.
const MAX_SEGMENTS: usize = 64;
/// Most bytes of one train: what one UDP send over IPv4 can carry.
const MAX_TRAIN_BYTES: usize = 65_507;

/// A train by its place in the arena.
#[derive(Clone, Copy, Debug)]
struct Placed {
    envelope: Envelope,
    stride: usize,
    at: usize,
    len: usize,
}

impl Placed {
    const fn count(&self) -> usize {
        self.len.div_ceil(self.stride)
    }

    /// Whether `len` bytes of datagrams of `stride` bytes may follow: same receiver, and none of those before
    /// them is shorter than the first.
    fn takes(&self, next: &Self) -> bool {
        let alone = next.len <= next.stride;
        self.envelope == next.envelope
            && self.len.is_multiple_of(self.stride)
            && (next.stride == self.stride || (alone && next.len < self.stride))
            && self.count() + next.count() <= MAX_SEGMENTS
            && self.len + next.len <= MAX_TRAIN_BYTES
    }
}

/// Memory for datagrams on their way out, allocated once.
#[derive(Debug)]
pub(crate) struct Arena {
    bytes: Box<[u8]>,
    filled: usize,
    trains: Vec<Placed>,
    reserved: Option<Placed>,
    unsealed: Unsealed,
    /// Datagrams that the sockets did not take.
    lost: u64,
    unsent: Unsent,
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; CAPACITY].into_boxed_slice(),
            filled: 0,
            trains: Vec::with_capacity(MAX_TRAINS),
            reserved: None,
            unsealed: Unsealed::new(),
            lost: 0,
            unsent: Unsent::new(),
        }
    }

    /// The arena as the core's outbox, emptied into `udp` when it is full.
    pub(crate) const fn outlet<'a, U: UdpQueue>(&'a mut self, udp: &'a mut U) -> Outlet<'a, U> {
        Outlet { arena: self, udp }
    }

    /// Bytes that wait to be sent.
    pub(crate) const fn filled(&self) -> usize {
        self.filled
    }

    pub(crate) const fn lost(&self) -> u64 {
        self.lost
    }

    /// A peer and how many bytes of its were not sent; each is given once.
    pub(crate) fn poll_unsent(&mut self) -> Option<(PeerId, u64)> {
        self.unsent.poll()
    }

    /// Keeps `len` bytes of the reservation, to be sealed before they are sent if that is not done.
    fn keep(&mut self, len: usize, sealing: Option<Sealing<'_>>) {
        let Some(mut next) = self.reserved.take() else { return };
        next.len = len.min(next.len);
        if next.len == 0 {
            return;
        }
        if let Some(sealing) = sealing {
            self.unsealed.keep(&mut self.bytes, next.at..next.at + next.len, next.stride, sealing);
        }
        self.filled += next.len;
        match self.trains.last_mut() {
            Some(last) if last.takes(&next) => last.len += next.len,
            _ => {
                // A lone datagram is as long as it is.
                next.stride = next.stride.min(next.len);
                self.trains.push(next);
            }
        }
    }

    /// Seals what is not sealed yet, and sends all of it.
    pub(crate) fn flush<U: UdpQueue>(&mut self, udp: &mut U) {
        if self.trains.is_empty() {
            return;
        }
        self.unsealed.seal(&mut self.bytes);
        let nobody = Envelope::new(Endpoint::new(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))));
        let none = Train { envelope: nobody, stride: 0, bytes: &[] };
        for group in self.trains.chunks(ROW) {
            let mut row = [none; ROW];
            for (train, placed) in row.iter_mut().zip(group) {
                let Placed { envelope, stride, at, len } = *placed;
                let bytes = self.bytes.get(at..at + len).unwrap_or_default();
                *train = Train { envelope, stride, bytes };
            }
            let mut rest = row.get(..group.len()).unwrap_or_default();
            while let [first, others @ ..] = rest {
                match udp.send(rest, &mut self.unsent) {
                    Ok(n) if n > 0 => rest = rest.get(n..).unwrap_or_default(),
                    Err(e) if e.kind() != io::ErrorKind::WouldBlock => {
                        self.lost += first.count() as u64;
                        self.unsent.note(first, first.bytes.len());
                        rest = others;
                    }
                    _ => {
                        // The socket has waited already; a network would drop them now.
                        for train in rest {
                            self.lost += train.count() as u64;
                            self.unsent.note(train, train.bytes.len());
                        }
                        break;
                    }
                }
            }
        }
        self.trains.clear();
        self.filled = 0;
    }
}

/// An [`Arena`] and the sockets it is emptied into.
#[derive(Debug)]
pub(crate) struct Outlet<'a, U: UdpQueue> {
    arena: &'a mut Arena,
    udp: &'a mut U,
}

impl<U: UdpQueue> Outbox for Outlet<'_, U> {
    fn reserve(&mut self, envelope: &Envelope, stride: usize, count: usize) -> Option<&mut [u8]> {
        let arena = &mut *self.arena;
        arena.reserved = None;
        let need = stride.checked_mul(count).filter(|&need| need > 0 && need <= CAPACITY)?;
        if arena.filled + need > CAPACITY || arena.trains.len() >= MAX_TRAINS {
            arena.flush(self.udp);
        }
        let at = arena.filled;
        arena.reserved = Some(Placed { envelope: *envelope, stride, at, len: need });
        arena.bytes.get_mut(at..at + need)
    }

    fn commit(&mut self, len: usize) {
        self.arena.keep(len, None);
    }

    fn defers(&self) -> bool {
        true
    }

    fn commit_clear(&mut self, len: usize, sealing: Sealing<'_>) {
        self.arena.keep(len, Some(sealing));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::batch::Ecn;
    use crate::io::{Poller, RxSlots, UdpCaps, UdpCounters};
    use crate::key::Secret;
    use crate::session::SealKey;
    use crate::time::Instant;

    /// Takes what it is told to take and remembers it.
    #[derive(Default)]
    struct Recorder {
        sent: Vec<(Endpoint, Ecn, usize, Vec<u8>)>,
        answers: Vec<io::Result<usize>>,
    }

    impl UdpQueue for Recorder {
        fn recv(&mut self, _: &mut RxSlots) -> io::Result<usize> {
            Err(io::ErrorKind::WouldBlock.into())
        }
        fn send(&mut self, trains: &[Train<'_>], _: &mut Unsent) -> io::Result<usize> {
            let taken = if self.answers.is_empty() { Ok(trains.len()) } else { self.answers.remove(0) };
            for train in &trains[..*taken.as_ref().unwrap_or(&0)] {
                let Envelope { to, .. } = train.envelope;
                self.sent.push((to, train.envelope.ecn(), train.stride, train.bytes.to_vec()));
            }
            taken
        }
        fn caps(&self) -> UdpCaps {
            UdpCaps { gso_segments: 1, gro: false }
        }
        fn open(&mut self, port: u16, _: u32) -> io::Result<u16> {
            Ok(port)
        }
        fn close(&mut self) {}
        fn port(&self) -> Option<u16> {
            None
        }
        fn attach(&mut self, _: &Poller) -> io::Result<()> {
            Ok(())
        }
        fn poll_lost_source(&mut self) -> Option<Endpoint> {
            None
        }
        fn counters(&self) -> UdpCounters {
            UdpCounters::default()
        }
    }

    fn to(port: u16) -> Endpoint {
        Endpoint::new(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }

    /// Ports number the peers, too.
    fn envelope(port: u16, ecn: Ecn) -> Envelope {
        Envelope { peer: Some(PeerId(port.into())), tos: ecn as u8, ..Envelope::new(to(port)) }
    }

    fn put(arena: &mut Arena, udp: &mut Recorder, port: u16, ecn: Ecn, datagram: &[u8]) {
        let mut outlet = arena.outlet(udp);
        outlet.reserve(&envelope(port, ecn), datagram.len(), 1).unwrap().copy_from_slice(datagram);
        outlet.commit(datagram.len());
    }

    /// What is laid out in the clear leaves sealed: at the end, when the arena is full, before a datagram that was
    /// sealed at once and after it.
    #[test]
    fn nothing_leaves_in_the_clear() {
        let key = Arc::new(SealKey::new(&Secret::take(&mut [7; 32]), 9, true, Instant::ZERO));
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        let mut expected = Vec::new();
        for n in 0..500_u64 {
            let len = 32 + (n as usize * 37) % 1400;
            let mut datagram = vec![n as u8; len];
            let mut outlet = arena.outlet(&mut udp);
            assert!(outlet.defers());
            let place = outlet.reserve(&envelope(1, Ecn::NotEct), len, 1).unwrap();
            place.copy_from_slice(&datagram);
            key.seal(n, &mut datagram);
            if n % 7 == 3 {
                place.copy_from_slice(&datagram);
                outlet.commit(len);
            } else {
                outlet.commit_clear(len, Sealing { key: &key, first: n });
            }
            expected.push(datagram);
        }
        arena.flush(&mut udp);
        let sent = udp.sent.iter().flat_map(|(_, _, stride, bytes)| bytes.chunks(*stride));
        assert!(sent.eq(expected.iter().map(Vec::as_slice)));
        assert_eq!(Arc::strong_count(&key), 1, "the key is let go");
    }

    fn shapes(udp: &Recorder) -> Vec<(u16, usize, usize)> {
        udp.sent.iter().map(|(to, _, stride, bytes)| (to.remote.port(), *stride, bytes.len())).collect()
    }

    #[test]
    fn neighbours_of_one_size_become_one_train_and_a_shorter_one_ends_it() {
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        for len in [100, 100, 100, 40, 40, 100, 30] {
            put(&mut arena, &mut udp, 1, Ecn::NotEct, &vec![7; len]);
        }
        arena.flush(&mut udp);
        assert_eq!(shapes(&udp), [(1, 100, 340), (1, 40, 40), (1, 100, 130)]);
    }

    #[test]
    fn other_receivers_and_other_ecn_bits_start_a_train_of_their_own() {
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        put(&mut arena, &mut udp, 1, Ecn::NotEct, b"aa");
        put(&mut arena, &mut udp, 2, Ecn::NotEct, b"bb");
        put(&mut arena, &mut udp, 2, Ecn::Ect0, b"cc");
        put(&mut arena, &mut udp, 2, Ecn::Ect0, b"dd");
        arena.flush(&mut udp);
        let expected = [(1, Ecn::NotEct, &b"aa"[..]), (2, Ecn::NotEct, b"bb"), (2, Ecn::Ect0, b"ccdd")];
        let expected: Vec<_> = expected.map(|(port, ecn, bytes)| (to(port), ecn, 2, bytes.to_vec())).into();
        assert_eq!(udp.sent, expected);
    }

    #[test]
    fn trains_stay_within_what_one_send_can_carry() {
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        for _ in 0..65 {
            put(&mut arena, &mut udp, 1, Ecn::NotEct, &[0; 32]);
        }
        for _ in 0..46 {
            put(&mut arena, &mut udp, 1, Ecn::NotEct, &[0; 1452]);
        }
        arena.flush(&mut udp);
        assert_eq!(shapes(&udp), [(1, 32, 64 * 32), (1, 32, 32), (1, 1452, 45 * 1452), (1, 1452, 1452)]);
    }

    #[test]
    fn reservation_of_several_is_kept_as_far_as_it_is_committed() {
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        let mut outlet = arena.outlet(&mut udp);
        outlet.reserve(&envelope(1, Ecn::NotEct), 10, 4).unwrap().fill(1);
        outlet.commit(25);
        outlet.reserve(&envelope(1, Ecn::NotEct), 10, 1).unwrap().fill(2);
        // Never committed: void.
        outlet.reserve(&envelope(1, Ecn::NotEct), 5, 1).unwrap().fill(3);
        outlet.commit(5);
        outlet.commit(5);
        arena.flush(&mut udp);
        assert_eq!(shapes(&udp), [(1, 10, 25), (1, 5, 5)]);
        assert_eq!(udp.sent[1].3, [3; 5]);
    }

    #[test]
    fn full_arena_is_sent_and_nothing_is_lost() {
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        for i in 0..1000_u32 {
            let mut datagram = vec![0; 32 + (i as usize * 37) % 1400];
            datagram[..4].copy_from_slice(&i.to_ne_bytes());
            put(&mut arena, &mut udp, (i / 3 % 5) as u16, Ecn::NotEct, &datagram);
        }
        put(&mut arena, &mut udp, 1, Ecn::NotEct, &[0; 65_568]);
        arena.flush(&mut udp);
        let seen: Vec<u32> = udp
            .sent
            .iter()
            .flat_map(|(_, _, stride, bytes)| bytes.chunks(*stride))
            .map(|d| u32::from_ne_bytes(d[..4].try_into().unwrap()))
            .collect();
        assert_eq!(seen[..1000], (0..1000).collect::<Vec<_>>());
        assert_eq!((seen.len(), arena.lost()), (1001, 0));
        assert!(arena.outlet(&mut udp).reserve(&envelope(1, Ecn::NotEct), CAPACITY + 1, 1).is_none());
        assert!(arena.outlet(&mut udp).reserve(&envelope(1, Ecn::NotEct), usize::MAX, 2).is_none());
    }

    #[test]
    fn what_the_sockets_do_not_take_is_offered_again_or_counted() {
        let (mut arena, mut udp) = (Arena::new(), Recorder::default());
        let refused = || io::Error::from_raw_os_error(libc::EPERM);
        udp.answers = vec![Ok(1), Err(refused()), Ok(1), Err(io::ErrorKind::WouldBlock.into())];
        for port in 1..=5 {
            put(&mut arena, &mut udp, port, Ecn::NotEct, b"x");
        }
        put(&mut arena, &mut udp, 5, Ecn::NotEct, b"y");
        arena.flush(&mut udp);
        assert_eq!(shapes(&udp), [(1, 1, 1), (3, 1, 1)]);
        assert_eq!(arena.lost(), 1 + 1 + 2);
        let unsent: Vec<_> =
            core::iter::from_fn(|| arena.poll_unsent()).map(|(peer, n)| (peer.0, n)).collect();
        assert_eq!(unsent, [(5, 2), (4, 1), (2, 1)]);
    }
}
