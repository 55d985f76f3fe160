//! What a packet costs: through a tunnel of ours and of boringtun's in the same run, and room by room.
//!
//! `cargo bench -p forestvpn-quantum --bench datapath_benches -- --measurement-time 3 --warm-up-time 1`
//!
//! Six minutes. A filter takes part of it: `-- 'capsulate/'` for one packet a call, `-- train` for trains, `-- part`
//! for the rest. The trains and the parts get a third of the time that is asked for: they are many.

#[path = "datapath_benches/door.rs"]
mod door;
#[path = "datapath_benches/parts.rs"]
mod parts;
#[path = "datapath_benches/trains.rs"]
mod trains;
#[allow(dead_code, unreachable_pub)]
#[path = "../forestvpn-quantum/tests/it/harness.rs"]
mod world;

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};

/// Sizes of IP packets: keys and games, the median of the Internet, the least MTU of IPv4, a usual MTU.
const SIZES: [usize; 5] = [64, 256, 576, 1024, 1420];
/// Datagrams per round of opening; each is good once, so they are sealed anew outside of the clock.
const ROUND: usize = 512;

/// Memory for a packet that starts at a page: where packets lie must not decide who is faster.
#[repr(align(4096))]
struct Page([u8; 2048]);

/// An IPv4 packet of `len` bytes.
fn packet(len: usize) -> Box<Page> {
    let mut page = Box::new(Page([0x5a; 2048]));
    page.0[0] = 0x45;
    page.0[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    page
}

/// The seconds that the command line gives for `flag`.
fn asked(flag: &str, default: f64) -> f64 {
    let mut args = std::env::args().skip_while(|arg| arg.split('=').next() != Some(flag));
    let first = args.next();
    let value = first.as_deref().and_then(|arg| arg.split_once('=')).map(|(_, v)| v.to_owned());
    value.or_else(|| args.next()).and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// A group whose benchmarks take a third of the time that was asked for.
fn brief<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.measurement_time(Duration::from_secs_f64(asked("--measurement-time", 5.0) / 3.0));
    group.warm_up_time(Duration::from_secs_f64(asked("--warm-up-time", 3.0) / 3.0));
    group
}

criterion_group!(benches, door::all, trains::all, parts::all);
criterion_main!(benches);
