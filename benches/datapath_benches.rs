//! What the crypto path costs: one packet through a tunnel of ours and of boringtun's, in the same run.
//!
//! `cargo bench -p forestvpn-quantum --bench datapath_benches -- --measurement-time 3 --warm-up-time 1`

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rand_core::OsRng;

/// Sizes of IP packets: keys and games, the median of the Internet, the least MTU of IPv4, a usual MTU.
const SIZES: [usize; 5] = [64, 256, 576, 1024, 1420];
/// Datagrams per round of decapsulation; each is good once, so they are sealed anew outside of the clock.
const ROUND: usize = 512;

fn packet(len: usize) -> Vec<u8> {
    let mut packet = vec![0x5a; len];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    packet
}

/// The same code for both crates: their paths and signatures are the same.
macro_rules! tunnels {
    ($name:ident, $krate:ident) => {
        mod $name {
            use super::*;
            use $krate::noise::{Tunn, TunnResult};
            use $krate::x25519::{PublicKey, StaticSecret};

            /// Two tunnels that have shaken hands.
            pub(super) fn pair() -> (Tunn, Tunn) {
                let (a, b) = (StaticSecret::random_from_rng(OsRng), StaticSecret::random_from_rng(OsRng));
                let (pa, pb) = (PublicKey::from(&a), PublicKey::from(&b));
                let mut a = Tunn::new(a, pb, None, None, 1, None);
                let mut b = Tunn::new(b, pa, None, None, 2, None);
                let init = network(a.format_handshake_initiation(&mut [0; 2048], false));
                let resp = network(b.decapsulate(None, &init, &mut [0; 2048]));
                let confirm = network(a.decapsulate(None, &resp, &mut [0; 2048]));
                assert!(matches!(b.decapsulate(None, &confirm, &mut [0; 2048]), TunnResult::Done));
                (a, b)
            }

            fn network(result: TunnResult<'_>) -> Vec<u8> {
                match result {
                    TunnResult::WriteToNetwork(datagram) => datagram.to_vec(),
                    _ => panic!("expected a datagram"),
                }
            }

            /// Time of `n` packets sealed one after the other into the same buffer.
            pub(super) fn encapsulate(size: usize, n: u64) -> Duration {
                let (mut a, _) = pair();
                let (packet, mut dst) = (packet(size), [0; 2048]);
                let start = Instant::now();
                for _ in 0..n {
                    let result = a.encapsulate(black_box(&packet), &mut dst);
                    assert!(matches!(black_box(result), TunnResult::WriteToNetwork(_)));
                }
                start.elapsed()
            }

            /// Time of `n` datagrams opened one after the other into the same buffer.
            pub(super) fn decapsulate(size: usize, n: u64) -> Duration {
                let (mut a, mut b) = pair();
                let (packet, mut dst) = (packet(size), [0; 2048]);
                let mut datagrams = vec![Vec::new(); ROUND];
                let (mut left, mut spent) = (n as usize, Duration::ZERO);
                while left > 0 {
                    let round = &mut datagrams[..left.min(ROUND)];
                    for datagram in round.iter_mut() {
                        *datagram = network(a.encapsulate(&packet, &mut dst));
                    }
                    let start = Instant::now();
                    for datagram in round.iter() {
                        let result = b.decapsulate(None, black_box(datagram), &mut dst);
                        assert!(matches!(black_box(result), TunnResult::WriteToTunnelV4(..)));
                    }
                    spent += start.elapsed();
                    left -= round.len();
                }
                spent
            }
        }
    };
}

tunnels!(ours, forestvpn_quantum);
tunnels!(theirs, boringtun);

type Run = fn(usize, u64) -> Duration;

fn compare(c: &mut Criterion, name: &str, ours: Run, theirs: Run) {
    let mut group = c.benchmark_group(name);
    for size in SIZES {
        group.throughput(Throughput::Bytes(size as u64));
        for (who, run) in [("forestvpn-quantum", ours), ("boringtun", theirs)] {
            group.bench_with_input(BenchmarkId::new(who, size), &size, |b, size| {
                b.iter_custom(|n| run(*size, n));
            });
        }
    }
    group.finish();
}

fn datapath(c: &mut Criterion) {
    compare(c, "encapsulate", ours::encapsulate, theirs::encapsulate);
    compare(c, "decapsulate", ours::decapsulate, theirs::decapsulate);
}

criterion_group!(benches, datapath);
criterion_main!(benches);
