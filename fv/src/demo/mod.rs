//! `fv demo`: the whole job in one command on a fresh machine: two ends, a tunnel between them, pings, a transfer,
//! and figures. Where a machine gives no TUN device it says so and shows what is left. Called by `main`.

/// Prints a line. A reader that has gone (`fv demo | head -1`) is no reason to break off and leave things behind.
macro_rules! say {
    ($($word:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($word)*);
    }};
}

mod bulk;
mod ends;
mod memory;
mod ping;
mod place;
mod report;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};

use bulk::{Load, transfer};
use ends::{End, Folder, inner};
use ping::ping;
use place::Place;
use report::Tunnel;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// How much to move, both directions together.
    pub(crate) megabytes: u64,
    /// Leave TUN devices and namespaces alone.
    pub(crate) no_tun: bool,
}

/// Pings of each direction and family, one right after the other.
const PINGS: usize = 200;
/// Pause between pings beside a transfer.
const BESIDE: Duration = Duration::from_millis(5);

/// Runs the demo and prints its report.
///
/// # Errors
/// What did not work, or what was not as it must be.
pub(crate) fn run(options: Options) -> Result<(), String> {
    // Before the first thread: only a process with one thread can become root of a user namespace.
    let place = if options.no_tun { Err("asked for with --no-tun".to_owned()) } else { Place::make() };
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(flag)).map_err(|e| e.to_string())?;
    }
    let verdict = match place {
        Ok(place) => in_tunnel(&place, options.megabytes),
        Err(reason) => {
            say!("no TUN, library path only: {reason}");
            say!(
                "Two ends in this process: TUN devices in memory, UDP over 127.0.0.1. No TCP runs here, so there is no \
         figure for it."
            );
            memory::run(options.megabytes)
                .map(|figures| report::memory(&figures))
                .map_err(|e| format!("the ends in memory do not work: {e}"))
        }
    };
    if interrupted() {
        return Err("interrupted; everything was taken down".to_owned());
    }
    let problems = verdict?;
    if problems.is_empty() {
        say!("\nEverything verified.");
        return Ok(());
    }
    Err(format!("not as it must be: {}", problems.join("; ")))
}

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Ctrl-C was pressed: whatever waits shall end, so that all can be taken down.
fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// The real thing. Gives what was not as it must be.
fn in_tunnel(place: &Place, megabytes: u64) -> Result<Vec<String>, String> {
    say!("fv demo: {}", place.how);
    let began = Instant::now();
    let folder = Folder::make()?;
    let [left, right] = &place.hosts;
    let ends = End::start_both(&place.hosts, place::outer(), &folder)?;
    say!(
        "  left   {} outside, {} and {} inside\n  right  {} outside, {} and {} inside",
        place::outer()[0],
        inner(0, false),
        inner(0, true),
        place::outer()[1],
        inner(1, false),
        inner(1, true)
    );

    let failed = |what: &str, e: std::io::Error| format!("{what}: {e}");
    let first =
        ping((left, right), inner(1, false), 1, Duration::ZERO, None).map_err(|e| failed("ping", e))?;
    let mut pings = Vec::new();
    for (from, to, side) in [(left, right, 1), (right, left, 0)] {
        for ipv6 in [false, true] {
            pings.push(
                ping((from, to), inner(side, ipv6), PINGS, Duration::ZERO, None)
                    .map_err(|e| failed("ping", e))?,
            );
        }
    }
    say!();
    report::latencies(&first, &pings);

    say!("\nTCP through the tunnel");
    let load = Load::new(megabytes.div_ceil(2));
    let before = ends.each_ref().map(End::cpu);
    let over = AtomicBool::new(false);
    let there = thread::scope(|scope| {
        let beside = scope.spawn(|| ping((left, right), inner(1, false), usize::MAX, BESIDE, Some(&over)));
        let there = transfer((left, right), inner(1, false), &load, "left to right, IPv4");
        over.store(true, Ordering::Relaxed);
        let beside =
            beside.join().map_err(|_| "the pings crashed".to_owned())?.map_err(|e| failed("ping", e))?;
        there.map(|there| (there, beside)).map_err(|e| failed("TCP", e))
    });
    let (there, beside) = there?;
    let back = transfer((right, left), inner(0, true), &load, "right to left, IPv6")
        .map_err(|e| failed("TCP", e))?;
    let after = ends.each_ref().map(End::cpu);
    let cpu = [0, 1].map(|side| after[side].saturating_sub(before[side]));

    let [a, b] = &ends;
    let snapshots = [a.snapshot()?, b.snapshot()?];
    let [a, b] = ends;
    let counters = [a.stop()?, b.stop()?];
    drop(folder);
    let figures = Tunnel { first, pings, beside, transfers: [there, back], cpu, snapshots, counters };
    let problems = report::tunnel(&figures);
    say!("\n{:.1} s in all; processes, namespaces and files are gone again.", began.elapsed().as_secs_f64());
    Ok(problems)
}
