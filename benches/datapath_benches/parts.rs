//! Rooms of the packet path one by one.

use std::hint::black_box;
use std::net::Ipv4Addr;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use forestvpn_quantum::batch::{Frame, Span};
use forestvpn_quantum::offload::VnetHdr;
use forestvpn_quantum::offload::coalesce::Coalescer;
use forestvpn_quantum::rooms::{Replay, Table, checksum, split};

use super::brief;
use super::trains::tcp;
use super::world::Seeded;

const SEGMENT: usize = 1420;
const TRAIN: usize = 45;

pub(super) fn all(c: &mut Criterion) {
    offloads(c);
    replay(c);
    routes(c);
}

/// The segments of a super-packet, one behind the other.
fn segments() -> Vec<u8> {
    let (hdr, mut bytes) = tcp(SEGMENT, TRAIN);
    let mut out = vec![0; SEGMENT * TRAIN];
    assert_eq!(split(Frame { hdr, bytes: &mut bytes }, &mut out), TRAIN);
    out
}

fn offloads(c: &mut Criterion) {
    let mut group = brief(c, "part");
    group.throughput(Throughput::Bytes((SEGMENT * TRAIN) as u64));
    let (hdr, mut bytes) = tcp(SEGMENT, TRAIN);
    let mut out = vec![0; SEGMENT * TRAIN];
    group.bench_function("split/45x1420", |b| {
        b.iter(|| split(Frame { hdr, bytes: black_box(&mut bytes) }, black_box(&mut out)));
    });
    let span = |i: usize| Span { at: (i * SEGMENT) as u32, len: SEGMENT as u16 };
    let spans: Vec<_> = (0..TRAIN).map(span).collect();
    let mut coalescer = Coalescer::new(TRAIN);
    // Planned and written out: the head of the run is changed, so each time it is a fresh one.
    let fresh = segments();
    group.bench_function("coalesce/45x1420", |b| {
        b.iter_batched_ref(
            || fresh.clone(),
            |bytes| {
                assert_eq!(coalescer.plan(bytes, &spans), 1);
                let write = coalescer.write(0, bytes, &spans).expect("one write");
                assert_eq!(write.hdr.gso_type, VnetHdr::GSO_TCPV4);
                coalescer.parts(&write, &spans).map(|part| black_box(part).len()).sum::<usize>()
            },
            BatchSize::SmallInput,
        );
    });
    for size in [64, 1420] {
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_with_input(BenchmarkId::new("checksum", size), &fresh[..size], |b, bytes| {
            b.iter(|| checksum(black_box(bytes)));
        });
    }
    group.finish();
}

fn replay(c: &mut Criterion) {
    let mut group = brief(c, "part");
    group.throughput(Throughput::Elements(1));
    let (mut window, mut counter) = (Replay::new(), 0);
    group.bench_function("replay/in order", |b| {
        b.iter(|| {
            counter += 1;
            assert!(window.take(black_box(counter)));
        });
    });
    let (mut window, mut counter) = (Replay::new(), 0);
    group.bench_function("replay/swapped in pairs", |b| {
        b.iter(|| {
            counter += 1;
            assert!(window.take(black_box(counter ^ 1)));
        });
    });
    group.finish();
}

fn routes(c: &mut Criterion) {
    let mut group = brief(c, "part");
    group.throughput(Throughput::Elements(1));
    for peers in [1_u32, 1_000, 100_000] {
        let mut seeded = Seeded(7);
        let addresses: Vec<_> = (0..peers).map(|_| Ipv4Addr::from(seeded.next() as u32)).collect();
        let table = Table::new(addresses.iter().copied());
        // In an order that no cache can guess.
        let asked: Vec<_> = (0..4096).map(|_| addresses[seeded.next() as usize % addresses.len()]).collect();
        let mut next = 0;
        group.bench_function(BenchmarkId::new("route", peers), |b| {
            b.iter(|| {
                next = (next + 1) % asked.len();
                assert!(table.lookup(black_box(asked[next])).is_some());
            });
        });
    }
    group.finish();
}
