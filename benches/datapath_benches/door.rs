//! The door that embedders of boringtun use, and boringtun itself: one packet a call.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use rand_core::OsRng;

use super::{Page, ROUND, SIZES, packet};

/// The same code for both crates: their paths and signatures are the same.
macro_rules! tunnels {
    ($name:ident, $krate:ident) => {
        pub(super) mod $name {
            use super::*;
            use $krate::noise::{Tunn, TunnResult};
            use $krate::x25519::{PublicKey, StaticSecret};

            /// Two tunnels that have shaken hands, and memory of their own.
            pub(in super::super) struct Pair {
                a: Tunn,
                b: Tunn,
                dst: Box<Page>,
                datagrams: Vec<Vec<u8>>,
            }

            fn network(result: TunnResult<'_>) -> Vec<u8> {
                match result {
                    TunnResult::WriteToNetwork(datagram) => datagram.to_vec(),
                    _ => panic!("expected a datagram"),
                }
            }

            impl Pair {
                pub(in super::super) fn new() -> Self {
                    let secret = || StaticSecret::random_from_rng(OsRng);
                    let (a, b) = (secret(), secret());
                    let (pa, pb) = (PublicKey::from(&a), PublicKey::from(&b));
                    let mut a = Tunn::new(a, pb, None, None, 1, None);
                    let mut b = Tunn::new(b, pa, None, None, 2, None);
                    let init = network(a.format_handshake_initiation(&mut [0; 2048], false));
                    let resp = network(b.decapsulate(None, &init, &mut [0; 2048]));
                    let confirm = network(a.decapsulate(None, &resp, &mut [0; 2048]));
                    assert!(matches!(b.decapsulate(None, &confirm, &mut [0; 2048]), TunnResult::Done));
                    let datagrams = vec![vec![0; 2048]; ROUND];
                    Self { a, b, dst: Box::new(Page([0; 2048])), datagrams }
                }

                /// Time of `n` packets sealed one after the other into the same buffer.
                pub(in super::super) fn encapsulate(&mut self, size: usize, n: usize) -> Duration {
                    let packet = packet(size);
                    let start = Instant::now();
                    for _ in 0..n {
                        let result = self.a.encapsulate(black_box(&packet.0[..size]), &mut self.dst.0);
                        assert!(matches!(black_box(result), TunnResult::WriteToNetwork(_)));
                    }
                    start.elapsed()
                }

                /// Time of `n` datagrams opened one after the other into the same buffer.
                pub(in super::super) fn decapsulate(&mut self, size: usize, n: usize) -> Duration {
                    let packet = packet(size);
                    let (mut left, mut spent) = (n, Duration::ZERO);
                    while left > 0 {
                        let round = &mut self.datagrams[..left.min(ROUND)];
                        for datagram in round.iter_mut() {
                            let result = self.a.encapsulate(&packet.0[..size], datagram);
                            assert!(matches!(result, TunnResult::WriteToNetwork(_)));
                        }
                        let start = Instant::now();
                        for datagram in round.iter() {
                            let datagram = black_box(&datagram[..size + 32]);
                            let result = self.b.decapsulate(None, datagram, &mut self.dst.0);
                            assert!(matches!(black_box(result), TunnResult::WriteToTunnelV4(..)));
                        }
                        spent += start.elapsed();
                        left -= round.len();
                    }
                    spent
                }
            }
        }
    };
}

tunnels!(ours, forestvpn_quantum);
tunnels!(theirs, boringtun);

pub(super) fn all(c: &mut Criterion) {
    for opening in [false, true] {
        let mut group = c.benchmark_group(if opening { "decapsulate" } else { "encapsulate" });
        for size in SIZES {
            group.throughput(Throughput::Bytes(size as u64));
            let mut pair = ours::Pair::new();
            group.bench_function(BenchmarkId::new("forestvpn-quantum", size), |b| {
                b.iter_custom(|n| match opening {
                    false => pair.encapsulate(size, n as usize),
                    true => pair.decapsulate(size, n as usize),
                });
            });
            let mut pair = theirs::Pair::new();
            group.bench_function(BenchmarkId::new("boringtun", size), |b| {
                b.iter_custom(|n| match opening {
                    false => pair.encapsulate(size, n as usize),
                    true => pair.decapsulate(size, n as usize),
                });
            });
        }
        group.finish();
    }
}
