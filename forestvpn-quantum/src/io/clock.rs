//! The machine's clocks: what the worker reads once per turn, and the timer that wakes it at a deadline.
//!
//! Both count time spent in suspend. `std::time::Instant` and the time-outs of `epoll_wait` do not: a laptop
//! that slept for an hour would use keys that are long too old, and would sleep on over deadlines that have
//! passed (C-SES-8).
#![expect(unsafe_code, reason = "std reads neither CLOCK_BOOTTIME nor timerfd")]

use std::fs::File;
use std::io;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use crate::time::{Clock, Instant, Now};

/// How long the wall clock is told forth from its last reading: each clock costs some, with every packet.
const UNIX_KEPT: Duration = Duration::from_millis(100);

/// CLOCK_BOOTTIME for ages and deadlines, CLOCK_REALTIME for timestamps. A wall clock that somebody sets is
/// followed within 100 ms.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock {
    /// When the wall clock was read last, and what it said.
    wall: Option<Now>,
}

impl Clock for BootClock {
    //@ C-SES-8
    fn now(&mut self) -> Now {
        let mono = mono();
        let unix = match self.wall {
            Some(wall) if mono.since(wall.mono) < UNIX_KEPT => {
                wall.unix.saturating_add(mono.since(wall.mono))
            }
            _ => {
                let unix = unix();
                self.wall = Some(Now { mono, unix });
                unix
            }
        };
        Now { mono, unix }
    }
}

/// CLOCK_BOOTTIME alone, for whoever counts nanoseconds: each clock costs some.
pub(crate) fn mono() -> Instant {
    Instant::from_nanos(u64::try_from(read(libc::CLOCK_BOOTTIME).as_nanos()).unwrap_or(u64::MAX))
}

/// A number that moves with every tick of the kernel's clock, each 1 to 10 ms. Costs a fifth of a clock.
pub(crate) fn tick() -> Option<Duration> {
    Some(read(libc::CLOCK_MONOTONIC_COARSE))
}

/// CLOCK_REALTIME alone.
pub(crate) fn unix() -> Duration {
    read(libc::CLOCK_REALTIME)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut spec = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: `spec` is valid for writes of one timespec. Should the call fail, it stays zeroed, which is a
    // valid timespec too; both clocks exist since Linux 2.6.39, so it does not.
    let spec = unsafe {
        libc::clock_gettime(clock, spec.as_mut_ptr());
        spec.assume_init()
    };
    // A wall clock set before 1970 is negative: taken as 1970.
    Duration::new(u64::try_from(spec.tv_sec).unwrap_or(0), u32::try_from(spec.tv_nsec).unwrap_or(0))
}

/// A timer descriptor on CLOCK_BOOTTIME: readable once the time is up, at once after a resume if need be.
#[derive(Debug)]
pub struct BootTimer(File);

impl BootTimer {
    /// A timer that is not armed.
    ///
    /// # Errors
    /// Out of descriptors or memory.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers involved.
        let fd =
            unsafe { libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made by the kernel for us and is owned by nobody else.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Goes off once, `after` from now; zero is the shortest time there is, not "never".
    ///
    /// # Errors
    /// None known for a valid timer.
    pub fn arm(&self, after: Duration) -> io::Result<()> {
        let after = after.max(Duration::from_nanos(1));
        let spec = libc::itimerspec {
            it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: libc::timespec {
                tv_sec: libc::time_t::try_from(after.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: after.subsec_nanos() as libc::c_long,
            },
        };
        // SAFETY: the descriptor is open, `spec` is a valid itimerspec, and the old value is not asked for.
        let done = unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const spec, ptr::null_mut()) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Takes note that the timer went off; until then it stays readable. Tells whether it had gone off.
    pub fn clear(&self) -> bool {
        (&self.0).read(&mut [0; 8]).is_ok()
    }
}

impl AsFd for BootTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::io::namespace::skip;

    #[test]
    fn boot_clock_moves_forward_and_knows_the_year() {
        let mut clock = BootClock::default();
        let first = clock.now();
        std::thread::sleep(Duration::from_millis(2));
        let second = clock.now();
        assert!(second.mono.since(first.mono) >= Duration::from_millis(2));
        assert!(second.unix > first.unix && second.unix.as_secs() > 1_700_000_000);
    }

    #[test]
    //@test C-SES-8
    fn boot_clock_is_the_clock_that_counts_suspend() {
        // /proc/uptime is CLOCK_BOOTTIME in seconds; CLOCK_MONOTONIC would differ by the time suspended. A machine that
        // never was is no proof: so once more where it was suspended for a day, as far as a program can tell.
        const INSIDE: &str = "FV_TEST_SUSPENDED";
        if std::env::var_os(INSIDE).is_none() {
            let name = "io::clock::tests::boot_clock_is_the_clock_that_counts_suspend";
            let again = Command::new("unshare")
                .args(["--time", "--boottime", "86400", "--fork"])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", name])
                .env(INSIDE, "1")
                .output();
            match again {
                Ok(run) if String::from_utf8_lossy(&run.stderr).starts_with("unshare:") => {
                    skip("suspend: no time namespace; run as root");
                }
                Ok(run) => assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout)),
                Err(_) => skip("suspend: the program unshare is missing; install util-linux"),
            }
        }
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let ours = BootClock::default().now().mono.since(Instant::ZERO).as_secs_f64();
        assert!((ours - uptime).abs() < 1.0, "{ours} against {uptime}");
    }

    #[test]
    fn timer_goes_off_once_and_not_before_its_time() {
        let timer = BootTimer::new().unwrap();
        assert!(!timer.clear());
        timer.arm(Duration::from_millis(20)).unwrap();
        assert!(!timer.clear());
        std::thread::sleep(Duration::from_millis(40));
        assert!(timer.clear());
        assert!(!timer.clear());
        timer.arm(Duration::ZERO).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert!(timer.clear());
    }
}
