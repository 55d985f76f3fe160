//! A clock that does not fall behind what peers have seen. They refuse handshakes whose timestamp is not later than the
//! last one (C-HS-3), so a router without a battery, which starts in the past, would be locked out until its clock is
//! set. Used by `up`, where there is a folder to remember in.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use forestvpn_quantum::io::BootClock;
use forestvpn_quantum::time::{Clock, Instant, Now};

/// How often what was remembered is written anew: flash memory wears out.
pub(crate) const STEP: Duration = Duration::from_secs(3600);
/// How long a clock that is behind is waited for, at most.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(500);

/// The machine's clock, whose wall time begins no earlier than `least` (since 1970).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Floored {
    clock: BootClock,
    least: Duration,
    began: Option<Instant>,
}

impl Floored {
    /// Begins at `least` or later; zero: as the machine says.
    pub(crate) fn new(least: Duration) -> Self {
        Self { least, ..Self::default() }
    }
}

impl Clock for Floored {
    fn now(&mut self) -> Now {
        let now = self.clock.now();
        if self.least.is_zero() {
            return now;
        }
        let began = *self.began.get_or_insert(now.mono);
        Now { unix: now.unix.max(self.least.saturating_add(now.mono.since(began))), ..now }
    }
}

/// The latest time that a peer may have seen, kept in a file.
#[derive(Debug)]
pub(crate) struct Mark {
    path: PathBuf,
    complained: bool,
}

impl Mark {
    /// In the folder that FV_STATE names, or else systemd's STATE_DIRECTORY; `None` without both.
    pub(crate) fn of(interface: &str) -> Option<Self> {
        let of = |name| std::env::var_os(name).filter(|folder| !folder.is_empty());
        let folder = of("FV_STATE").or_else(|| of("STATE_DIRECTORY"))?;
        Some(Self { path: Path::new(&folder).join(format!("{interface}.clock")), complained: false })
    }

    /// A time that is later than all that a peer has seen. A process that was killed may have used up to [`STEP`] more
    /// than it had written.
    pub(crate) fn read(&self) -> Option<Duration> {
        let text = fs::read_to_string(&self.path).ok()?;
        let (seconds, how) = text.trim().split_once(' ')?;
        let seconds = Duration::from_secs(seconds.parse().ok()?);
        let more = if how == "ended" { Duration::ZERO } else { STEP };
        Some(seconds.saturating_add(more).saturating_add(Duration::from_secs(1)))
    }

    /// Writes down `time` (since 1970), in a way that a power cut leaves the old or the new text. Says once that it
    /// cannot.
    pub(crate) fn write(&mut self, time: Duration, ended: bool) {
        let how = if ended { "ended" } else { "runs" };
        let beside = self.path.with_extension("new");
        let done = fs::write(&beside, format!("{} {how}\n", time.as_secs()))
            .and_then(|()| fs::File::open(&beside)?.sync_all())
            .and_then(|()| fs::rename(&beside, &self.path));
        if let Err(error) = done
            && !std::mem::replace(&mut self.complained, true)
        {
            log::warn!("cannot remember the time in {}: {error}", self.path.display());
        }
    }
}

/// The wall clock, since 1970.
pub(crate) fn wall() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Waits for a clock that is behind `least`, at most for a minute or FV_CLOCK_WAIT seconds, and gives what a clock needs
/// to be ahead of it: zero when the machine's is by then.
pub(crate) fn settle(least: Duration) -> Duration {
    let patience = std::env::var("FV_CLOCK_WAIT").ok().and_then(|word| word.parse().ok());
    settle_with(least, patience.map_or(PATIENCE, Duration::from_secs), wall, thread::sleep)
}

fn settle_with(
    least: Duration,
    patience: Duration,
    wall: impl Fn() -> Duration,
    mut sleep: impl FnMut(Duration),
) -> Duration {
    if wall() >= least {
        return Duration::ZERO;
    }
    log::warn!(
        "the clock is behind its last use here; waiting up to {} s until it is set",
        patience.as_secs()
    );
    let mut waited = Duration::ZERO;
    while waited < patience && wall() < least {
        sleep(LOOK);
        waited += LOOK;
    }
    if wall() >= least {
        return Duration::ZERO;
    }
    log::warn!(
        "the clock is still behind: handshakes are dated as if it were right, so that peers take them"
    );
    least
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn f12_what_was_written_is_later_than_all_that_was_used_also_after_a_power_cut() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut mark = Mark { path: folder.path().join("wg0.clock"), complained: false };
        assert_eq!(mark.read(), None);
        mark.write(secs(1_700_000_000), false);
        assert_eq!(mark.read(), Some(secs(1_700_000_000 + 3600 + 1)));
        mark.write(secs(1_700_000_009), true);
        assert_eq!(mark.read(), Some(secs(1_700_000_010)));
        for rubbish in ["", "x ended", "17"] {
            fs::write(folder.path().join("wg0.clock"), rubbish).expect("written");
            assert_eq!(mark.read(), None, "{rubbish}");
        }
        let mut nowhere = Mark { path: "/nowhere/wg0.clock".into(), complained: false };
        nowhere.write(secs(5), true);
        assert!(nowhere.complained);
    }

    #[test]
    fn a_clock_that_is_behind_is_waited_for_and_then_done_without() {
        let time = Cell::new(secs(100));
        let pass = |by: Duration| time.set(time.get() + by);
        let wall = || time.get();
        assert_eq!(settle_with(secs(100), secs(60), wall, |_| panic!("no need to wait")), Duration::ZERO);
        // It is set after some seconds; it is not.
        let set = |by| if time.get() >= secs(105) { time.set(secs(5000)) } else { pass(by) };
        assert_eq!(settle_with(secs(4000), secs(60), wall, set), Duration::ZERO);
        time.set(secs(100));
        assert_eq!(settle_with(secs(4000), secs(60), wall, pass), secs(4000));
        assert_eq!(time.get(), secs(160));
    }

    #[test]
    fn time_goes_on_from_the_floor_and_follows_the_machine_when_that_is_ahead() {
        let ahead = wall() + secs(1000);
        let mut clock = Floored::new(ahead);
        assert_eq!(clock.now().unix, ahead);
        thread::sleep(Duration::from_millis(20));
        assert!(clock.now().unix >= ahead + Duration::from_millis(20));
        let drift = Floored::new(secs(1)).now().unix.abs_diff(wall());
        assert!(drift < secs(1), "{drift:?}");
    }
}
