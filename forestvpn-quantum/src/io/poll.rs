//! Where the worker waits when there is nothing to do: for a packet, a command, or a deadline.
//!
//! Readiness is edge-triggered. The worker reads until a queue says that it is dry and only then parks, so
//! nothing that waits is ever slept over.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use super::clock::BootTimer;
use crate::time::Instant;

const WAKER: Token = Token(0);
const TIMER: Token = Token(1);
const QUEUE: Token = Token(2);

/// One thread's waiting place.
#[derive(Debug)]
pub struct Poller {
    poll: Poll,
    events: Events,
    waker: Arc<Waker>,
    timer: BootTimer,
    /// When the timer goes off, if it is armed.
    armed: Option<Instant>,
}

impl Poller {
    /// An empty waiting place.
    ///
    /// # Errors
    /// Out of descriptors or memory.
    pub fn new() -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let timer = BootTimer::new()?;
        let fd = timer.as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&fd), TIMER, Interest::READABLE)?;
        Ok(Self { poll, events: Events::with_capacity(8), waker, timer, armed: None })
    }

    /// Wakes the thread that parks here, from any thread; also the next time it parks.
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// Has [`Poller::park`] return when `fd` becomes readable or breaks, until it is closed. Watching twice is the same as once.
    ///
    /// # Errors
    /// When the kernel refuses to watch it.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        match self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), QUEUE, Interest::READABLE) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// Waits until something happens or the deadline has passed; `None` waits for events only. May return
    /// early for no reason.
    ///
    /// The timer is moved only when it would go off too late: under traffic deadlines move with every
    /// packet, and a needless wake-up is cheaper than a system call each time.
    ///
    /// # Errors
    /// None known; a signal only ends the wait.
    pub fn park(&mut self, now: Instant, deadline: Option<Instant>) -> io::Result<()> {
        if let Some(deadline) = deadline
            && self.armed.is_none_or(|armed| deadline < armed)
        {
            self.timer.arm(deadline.since(now))?;
            self.armed = Some(deadline);
        }
        match self.poll.poll(&mut self.events, None) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
        if self.events.iter().any(|e| e.token() == TIMER) && self.timer.clear() {
            self.armed = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time;
    use std::time::Duration;

    use super::*;
    use crate::io::BootClock;
    use crate::time::Clock;

    fn parked(poller: &mut Poller, millis: Option<u64>) -> Duration {
        let now = BootClock.now().mono;
        let start = time::Instant::now();
        poller.park(now, millis.map(|ms| now.after(Duration::from_millis(ms)))).unwrap();
        start.elapsed()
    }

    #[test]
    fn parking_ends_at_the_deadline_and_not_before() {
        let mut poller = Poller::new().unwrap();
        let waited = parked(&mut poller, Some(30));
        assert!(waited >= Duration::from_millis(30) && waited < Duration::from_millis(500), "{waited:?}");
        // An earlier deadline replaces a later one that is armed.
        let waker = poller.waker();
        waker.wake().unwrap();
        assert!(parked(&mut poller, Some(60_000)) < Duration::from_secs(1));
        assert!(parked(&mut poller, Some(20)) < Duration::from_secs(1));
    }

    #[test]
    fn wake_from_another_thread_ends_the_wait_even_when_it_comes_first() {
        let mut poller = Poller::new().unwrap();
        let waker = poller.waker();
        std::thread::spawn(move || waker.wake().unwrap()).join().unwrap();
        assert!(parked(&mut poller, Some(10_000)) < Duration::from_secs(5));
    }

    #[test]
    fn datagram_that_came_before_parking_wakes_at_once() {
        let mut poller = Poller::new().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        poller.watch(socket.as_fd()).unwrap();
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        assert!(parked(&mut poller, None) < Duration::from_secs(5));
    }
}
