//! Trains of packets through a [`Device`], and as many calls of boringtun beside them.
//!
//! Outward a train is one TCP super-packet, as a TUN device with offloads hands it over; inward one UDP read. Routing,
//! the cut, the checksums, the replay window and the timers are in the figures.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use forestvpn_quantum::batch::{Ecn, Endpoint, Envelope, Frame, Outbox, Received, Span};
use forestvpn_quantum::offload::VnetHdr;

use super::door::theirs;
use super::world::{A, B, World, inner};
use super::{ROUND, SIZES, brief};

const TRAINS: [usize; 3] = [1, 8, 45];

/// An outbox as the worker has one: memory taken once, here for a whole round.
pub(super) struct Arena {
    bytes: Vec<u8>,
    used: usize,
}

impl Arena {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; ROUND * 2048], used: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.used = 0;
    }
}

impl Outbox for Arena {
    fn reserve(&mut self, _: &Envelope, stride: usize, count: usize) -> Option<&mut [u8]> {
        self.bytes.get_mut(self.used..self.used + stride * count)
    }

    fn commit(&mut self, len: usize) {
        self.used += len;
    }
}

/// A TCP packet or, of `count` segments of `size` bytes, a super-packet from A to B.
pub(super) fn tcp(size: usize, count: usize) -> (VnetHdr, Vec<u8>) {
    let payload = (size - 40) * count;
    let mut p = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0];
    p.extend(inner(A));
    p.extend(inner(B));
    p.extend([0x13, 0x88, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    p.resize(40 + payload, 0x5a);
    let len = p.len() as u16;
    p[2..4].copy_from_slice(&len.to_be_bytes());
    let hdr = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type: VnetHdr::GSO_TCPV4,
        hdr_len: 40,
        gso_size: (size - 40) as u16,
        csum_start: 20,
        csum_offset: 16,
    };
    (if count == 1 { VnetHdr::default() } else { hdr }, p)
}

/// Two devices with a session, and the memory their loops work in.
struct Rig {
    world: World,
    out: Arena,
    answers: Arena,
    plain: Vec<Span>,
}

impl Rig {
    fn new() -> Self {
        let mut world = World::pair();
        world.connect(A, B);
        Self { world, out: Arena::new(), answers: Arena::new(), plain: Vec::with_capacity(ROUND) }
    }

    /// Time of `n` trains sealed one after the other into the same memory.
    fn outbound(&mut self, (hdr, mut bytes): (VnetHdr, Vec<u8>), count: usize, n: usize) -> Duration {
        let now = self.world.now();
        let device = &mut self.world.hosts[A].device;
        let start = Instant::now();
        for _ in 0..n {
            self.out.clear();
            let sent = device.outbound(now, Frame { hdr, bytes: black_box(&mut bytes) }, &mut self.out);
            assert_eq!(black_box(sent), Ok(count));
        }
        start.elapsed()
    }

    /// Time of `n` trains opened where they lie.
    fn inbound(&mut self, (hdr, mut bytes): (VnetHdr, Vec<u8>), count: usize, n: usize) -> Duration {
        let now = self.world.now();
        let from = Endpoint::new(self.world.hosts[A].addr);
        let [a, b] = &mut self.world.hosts[..] else { panic!("two hosts") };
        let (mut left, mut spent) = (n, Duration::ZERO);
        while left > 0 {
            let round = left.min(ROUND / count);
            self.out.clear();
            for _ in 0..round {
                let sent = a.device.outbound(now, Frame { hdr, bytes: &mut bytes }, &mut self.out);
                assert_eq!(sent, Ok(count));
            }
            let train = self.out.used / round;
            let start = Instant::now();
            for bytes in self.out.bytes[..self.out.used].chunks_mut(train) {
                self.plain.clear();
                let rx = Received { bytes, stride: train / count, from, ecn: Ecn::NotEct };
                b.device.inbound(now, black_box(rx), &mut self.plain, &mut self.answers);
                assert_eq!(black_box(&self.plain).len(), count);
            }
            spent += start.elapsed();
            left -= round;
        }
        spent
    }
}

pub(super) fn all(c: &mut Criterion) {
    for opening in [false, true] {
        let way = if opening { "decapsulate" } else { "encapsulate" };
        for count in TRAINS {
            let mut group = brief(c, &format!("{way} train of {count}"));
            for size in SIZES {
                group.throughput(Throughput::Bytes((size * count) as u64));
                let mut rig = Rig::new();
                group.bench_function(BenchmarkId::new("forestvpn-quantum", size), |b| {
                    b.iter_custom(|n| match opening {
                        false => rig.outbound(tcp(size, count), count, n as usize),
                        true => rig.inbound(tcp(size, count), count, n as usize),
                    });
                });
                let mut pair = theirs::Pair::new();
                group.bench_function(BenchmarkId::new("boringtun", size), |b| {
                    b.iter_custom(|n| match opening {
                        false => pair.encapsulate(size, n as usize * count),
                        true => pair.decapsulate(size, n as usize * count),
                    });
                });
            }
            group.finish();
        }
    }
}
