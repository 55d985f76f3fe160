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
const TUN: Token = Token(2);
const UDP4: Token = Token(3);
const UDP6: Token = Token(4);

/// A queue that can be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// A TUN queue.
    Tun,
    /// The UDP socket for IPv4.
    Udp4,
    /// The UDP socket for IPv6.
    Udp6,
}

/// Which queues may have something to read. What is not marked was read until dry and has not stirred since, so
/// that a system call for it would be in vain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// The TUN queue.
    pub tun: bool,
    /// The UDP socket for IPv4.
    pub udp4: bool,
    /// The UDP socket for IPv6.
    pub udp6: bool,
}

impl Ready {
    /// Nothing is known: all have to be tried.
    pub const ALL: Self = Self { tun: true, udp4: true, udp6: true };
}

/// One thread's waiting place.
#[derive(Debug)]
pub struct Poller {
    poll: Poll,
    events: Events,
    waker: Arc<Waker>,
    timer: BootTimer,
    /// When the timer goes off, if it is armed.
    armed: Option<Instant>,
    /// Waits in a row that ended with an error.
    failures: u32,
}

/// So many errors in a row end a thread. One may be anything, such as a debugger that lets go of it.
const MOST_FAILURES: u32 = 100;

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
        Ok(Self { poll, events: Events::with_capacity(8), waker, timer, armed: None, failures: 0 })
    }

    /// Wakes the thread that parks here, from any thread; also the next time it parks.
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// Has [`Poller::park`] return when `fd` becomes readable or breaks, until it is closed. Watching twice is
    /// the same as once.
    ///
    /// # Errors
    /// When the kernel refuses to watch it.
    pub fn watch(&self, fd: BorrowedFd<'_>, queue: Queue) -> io::Result<()> {
        let token = match queue {
            Queue::Tun => TUN,
            Queue::Udp4 => UDP4,
            Queue::Udp6 => UDP6,
        };
        match self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), token, Interest::READABLE) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// Takes back [`Poller::watch`].
    ///
    /// # Errors
    /// It was not watched.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.poll.registry().deregister(&mut SourceFd(&fd.as_raw_fd()))
    }

    /// Waits until something happens or the deadline has passed; `None` waits for events only. May return
    /// early for no reason. Gives the queues that stirred; all, when it was no queue that woke it.
    ///
    /// The timer is moved only when it would go off too late: under traffic deadlines move with every
    /// packet, and a needless wake-up is cheaper than a system call each time.
    ///
    /// # Errors
    /// The kernel refused to wait a hundred times in a row; a signal only ends the wait.
    pub fn park(&mut self, now: Instant, deadline: Option<Instant>) -> io::Result<Ready> {
        let mut limit = None;
        if let Some(deadline) = deadline
            && self.armed.is_none_or(|armed| deadline < armed)
        {
            match self.timer.arm(deadline.since(now)) {
                Ok(()) => self.armed = Some(deadline),
                // Then without the timer, which matters for those who sleep in between.
                Err(_) => limit = Some(deadline.since(now)),
            }
        }
        match self.poll.poll(&mut self.events, limit) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => {
                self.failures += 1;
                if self.failures >= MOST_FAILURES {
                    return Err(e);
                }
                return Ok(Ready::ALL);
            }
            _ => self.failures = 0,
        }
        if limit.is_some() {
            return Ok(Ready::ALL);
        }
        let mut ready = Ready::default();
        for event in &self.events {
            match event.token() {
                TUN => ready.tun = true,
                UDP4 => ready.udp4 = true,
                UDP6 => ready.udp6 = true,
                _ => ready = Ready::ALL,
            }
        }
        if self.events.iter().any(|e| e.token() == TIMER) && self.timer.clear() {
            self.armed = None;
        }
        Ok(ready)
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
        let now = BootClock::default().now().mono;
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
        poller.watch(socket.as_fd(), Queue::Udp4).unwrap();
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        assert!(parked(&mut poller, None) < Duration::from_secs(5));
    }

    #[test]
    fn parking_tells_which_queue_stirred_and_all_of_them_when_it_was_none() {
        let mut poller = Poller::new().unwrap();
        let sockets = [Queue::Udp4, Queue::Udp6, Queue::Tun].map(|queue| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_nonblocking(true).unwrap();
            poller.watch(socket.as_fd(), queue).unwrap();
            socket
        });
        let none = Ready::default();
        let expected =
            [Ready { udp4: true, ..none }, Ready { udp6: true, ..none }, Ready { tun: true, ..none }];
        for (socket, ready) in sockets.iter().zip(expected) {
            socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
            assert_eq!(poller.park(Instant::ZERO, None).unwrap(), ready);
            // Not read, yet it does not stir again; a second datagram does.
            socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
            assert_eq!(poller.park(Instant::ZERO, None).unwrap(), ready);
        }
        poller.waker().wake().unwrap();
        assert_eq!(poller.park(Instant::ZERO, None).unwrap(), Ready::ALL);
        let now = BootClock::default().now().mono;
        assert_eq!(poller.park(now, Some(now.after(Duration::from_millis(10)))).unwrap(), Ready::ALL);
    }
}
