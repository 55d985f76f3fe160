//! Queues in memory: a TUN device and a UDP network that need no kernel and no privilege.
//!
//! Tests drive two workers over them and make any call fail; `fv demo` uses the TUN half where no TUN device
//! is to be had. Both ends of a link may live in different threads.
#![expect(
    clippy::disallowed_types,
    reason = "two threads share a link in memory; no real packet passes here"
)]

use std::collections::VecDeque;
use std::io;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mio::Waker;

use super::{Poller, RxMeta, RxSlots, TunCaps, TunQueue, UdpCaps, UdpCounters, UdpQueue};
use crate::batch::{Ecn, Endpoint, LocalAddr, Train, Unsent};
use crate::offload::VnetHdr;

/// Which calls of a queue fail, and how: each is named by its number, counted from 1, and an `errno`.
#[derive(Debug, Default)]
pub struct Faults {
    recv: Calls,
    send: Calls,
    open: Calls,
}

#[derive(Debug, Default)]
struct Calls {
    made: u64,
    planned: Vec<(u64, i32)>,
}

impl Calls {
    fn next(&mut self) -> io::Result<()> {
        self.made += 1;
        match self.planned.iter().position(|&(call, _)| call == self.made) {
            Some(i) => Err(io::Error::from_raw_os_error(self.planned.swap_remove(i).1)),
            None => Ok(()),
        }
    }

    fn plan(&mut self, ahead: u64, errno: i32) {
        self.planned.push((self.made + ahead, errno));
    }
}

impl Faults {
    /// The `n`-th `recv` from here on fails with `errno`.
    pub fn fail_recv(&mut self, n: u64, errno: i32) {
        self.recv.plan(n, errno);
    }

    /// The `n`-th `send` from here on fails with `errno`.
    pub fn fail_send(&mut self, n: u64, errno: i32) {
        self.send.plan(n, errno);
    }

    /// The `n`-th `open` from here on fails with `errno`.
    pub fn fail_open(&mut self, n: u64, errno: i32) {
        self.open.plan(n, errno);
    }
}

#[derive(Debug)]
struct Parcel {
    bytes: Vec<u8>,
    hdr: VnetHdr,
    from: Option<SocketAddr>,
    ecn: Ecn,
}

/// One direction: a bounded queue that gives its memory back, so that a steady flow allocates nothing.
#[derive(Debug, Default)]
struct Pipe {
    queue: VecDeque<Parcel>,
    spare: Vec<Vec<u8>>,
    waker: Option<Arc<Waker>>,
}

impl Pipe {
    fn push(&mut self, parts: &[IoSlice<'_>], hdr: VnetHdr, from: Option<SocketAddr>, ecn: Ecn) {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        for part in parts {
            bytes.extend_from_slice(part);
        }
        self.queue.push_back(Parcel { bytes, hdr, from, ecn });
        if let Some(waker) = &self.waker
            && self.queue.len() == 1
        {
            // A waker whose poller is gone wakes nobody; that is not the sender's trouble.
            let _ = waker.wake();
        }
    }

    fn recycle(&mut self, parcel: Parcel) {
        self.spare.push(parcel.bytes);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One end of a TUN device in memory; what one end sends, the other receives.
#[derive(Debug)]
pub struct MemTun {
    rx: Arc<Mutex<Pipe>>,
    tx: Arc<Mutex<Pipe>>,
    limit: usize,
    /// Calls that shall fail.
    pub faults: Faults,
}

/// Both ends of a TUN device: give one to the worker, and use the other as the machine would. At most `limit`
/// packets wait in each direction; one more is refused with `ENOBUFS`.
pub fn tun_pair(limit: usize) -> (MemTun, MemTun) {
    let (a, b) = (Arc::default(), Arc::default());
    let end = |rx: &Arc<_>, tx: &Arc<_>| MemTun {
        rx: Arc::clone(rx),
        tx: Arc::clone(tx),
        limit,
        faults: Faults::default(),
    };
    (end(&a, &b), end(&b, &a))
}

impl TunQueue for MemTun {
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<(usize, VnetHdr)> {
        self.faults.recv.next()?;
        let mut pipe = lock(&self.rx);
        let parcel = pipe.queue.pop_front().ok_or(io::ErrorKind::WouldBlock)?;
        // As the kernel does: what does not fit is cut off.
        let len = parcel.bytes.len().min(buf.len());
        for (to, from) in buf.iter_mut().zip(&parcel.bytes) {
            *to = *from;
        }
        let hdr = parcel.hdr;
        pipe.recycle(parcel);
        Ok((len, hdr))
    }

    fn send(&mut self, hdr: &VnetHdr, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.faults.send.next()?;
        let mut pipe = lock(&self.tx);
        if pipe.queue.len() >= self.limit {
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        pipe.push(parts, *hdr, None, Ecn::NotEct);
        Ok(())
    }

    fn caps(&self) -> TunCaps {
        TunCaps { vnet: true, tso: false, uso: false }
    }

    fn attach(&mut self, poller: &Poller) -> io::Result<()> {
        let mut pipe = lock(&self.rx);
        pipe.waker = Some(poller.waker());
        if !pipe.queue.is_empty() {
            poller.waker().wake()?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Host {
    addr: SocketAddr,
    open: bool,
    inbox: Pipe,
}

/// One host on a network of two in memory. A datagram arrives when the other host is open at the address it
/// was sent to, and vanishes otherwise.
#[derive(Debug)]
pub struct MemUdp {
    hosts: Arc<Mutex<[Host; 2]>>,
    me: usize,
    limit: usize,
    lost_source: Option<Endpoint>,
    last_to: Option<Endpoint>,
    counters: UdpCounters,
    /// Calls that shall fail.
    pub faults: Faults,
}

/// Two hosts with a cable between them; `limit` datagrams may be under way to each. Opened with port 0, a
/// host has the port given here.
pub fn udp_pair(first: SocketAddr, second: SocketAddr, limit: usize) -> (MemUdp, MemUdp) {
    let host = |addr| Host { addr, open: false, inbox: Pipe::default() };
    let hosts = Arc::new(Mutex::new([host(first), host(second)]));
    let end = |me| MemUdp {
        hosts: Arc::clone(&hosts),
        me,
        limit,
        lost_source: None,
        last_to: None,
        counters: UdpCounters::default(),
        faults: Faults::default(),
    };
    (end(0), end(1))
}

/// The two hosts as (me, other).
fn sides(hosts: &mut [Host; 2], me: usize) -> (&mut Host, &mut Host) {
    let [first, second] = hosts;
    if me == 0 { (first, second) } else { (second, first) }
}

impl MemUdp {
    /// Lets the address of this host change, as when a laptop moves to another network.
    pub fn move_to(&mut self, addr: SocketAddr) {
        sides(&mut lock(&self.hosts), self.me).0.addr = addr;
    }

    /// Where the latest datagram was sent to, and from which address.
    pub const fn last_to(&self) -> Option<Endpoint> {
        self.last_to
    }

    /// Makes [`UdpQueue::poll_lost_source`] report `endpoint`.
    pub fn lose_source(&mut self, endpoint: Endpoint) {
        self.lost_source = Some(endpoint);
    }
}

impl UdpQueue for MemUdp {
    fn recv(&mut self, slots: &mut RxSlots) -> io::Result<usize> {
        slots.clear();
        self.faults.recv.next()?;
        let mut hosts = lock(&self.hosts);
        let (me, _) = sides(&mut hosts, self.me);
        while slots.filled() < slots.count() {
            let slot = slots.filled();
            let Some(parcel) = me.inbox.queue.pop_front() else { break };
            let Some((near, far)) = slots.buffers(slot) else { break };
            for (to, from) in near.iter_mut().chain(far).zip(&parcel.bytes) {
                *to = *from;
            }
            let local = Some(LocalAddr { ip: me.addr.ip(), ifindex: 0 });
            let len = parcel.bytes.len();
            if let Some(remote) = parcel.from {
                let from = Endpoint { remote, local };
                slots.push(RxMeta { slot, len, stride: len, from, ecn: parcel.ecn });
            }
            me.inbox.recycle(parcel);
        }
        self.counters.reads += 1;
        self.counters.received += slots.filled() as u64;
        if slots.filled() == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(slots.filled()) }
    }

    fn send(&mut self, trains: &[Train<'_>], unsent: &mut Unsent) -> io::Result<usize> {
        self.faults.send.next()?;
        let mut hosts = lock(&self.hosts);
        let (me, other) = sides(&mut hosts, self.me);
        self.counters.writes += 1;
        let mut taken = 0;
        self.last_to = trains.last().map(|train| train.envelope.to);
        for train in trains {
            let count = train.count();
            if !me.open {
                self.counters.lost_no_socket += count as u64;
                unsent.note(train, train.bytes.len());
            } else if train.envelope.to.remote != other.addr || !other.open {
                self.counters.sent += count as u64;
            } else if other.inbox.queue.len() + count > self.limit {
                break;
            } else {
                let (from, ecn) = (Some(me.addr), train.envelope.ecn());
                for datagram in train.bytes.chunks(train.stride.max(1)) {
                    other.inbox.push(&[IoSlice::new(datagram)], VnetHdr::default(), from, ecn);
                }
                self.counters.sent += count as u64;
            }
            taken += 1;
        }
        if taken == 0 && !trains.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(taken) }
    }

    fn caps(&self) -> UdpCaps {
        UdpCaps { gso_segments: 1, gro: false }
    }

    fn open(&mut self, port: u16, _fwmark: u32) -> io::Result<u16> {
        self.faults.open.next()?;
        let mut hosts = lock(&self.hosts);
        let (me, _) = sides(&mut hosts, self.me);
        if port != 0 {
            me.addr.set_port(port);
        }
        me.open = true;
        Ok(me.addr.port())
    }

    fn close(&mut self) {
        let mut hosts = lock(&self.hosts);
        let (me, _) = sides(&mut hosts, self.me);
        me.open = false;
        me.inbox.queue.clear();
    }

    fn port(&self) -> Option<u16> {
        let mut hosts = lock(&self.hosts);
        let (me, _) = sides(&mut hosts, self.me);
        me.open.then(|| me.addr.port())
    }

    fn attach(&mut self, poller: &Poller) -> io::Result<()> {
        let mut hosts = lock(&self.hosts);
        let (me, _) = sides(&mut hosts, self.me);
        me.inbox.waker = Some(poller.waker());
        if !me.inbox.queue.is_empty() {
            poller.waker().wake()?;
        }
        Ok(())
    }

    fn poll_lost_source(&mut self) -> Option<Endpoint> {
        self.lost_source.take()
    }

    fn counters(&self) -> UdpCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Envelope;

    fn hosts() -> (MemUdp, MemUdp) {
        let (mut a, mut b) =
            udp_pair("192.0.2.1:1000".parse().unwrap(), "192.0.2.2:2000".parse().unwrap(), 4);
        a.open(0, 0).unwrap();
        b.open(0, 0).unwrap();
        (a, b)
    }

    fn train<'b>(to: &str, stride: usize, bytes: &'b [u8]) -> Train<'b> {
        Train {
            envelope: Envelope { tos: 2, ..Envelope::new(Endpoint::new(to.parse().unwrap())) },
            stride,
            bytes,
        }
    }

    #[test]
    fn train_arrives_as_its_datagrams_with_source_and_ecn() {
        let (mut a, mut b) = hosts();
        let mut slots = RxSlots::new(8);
        assert_eq!(a.send(&[train("192.0.2.2:2000", 2, b"aabbc")], &mut Unsent::new()).unwrap(), 1);
        assert_eq!(b.recv(&mut slots).unwrap(), 3);
        let last = slots.received(2).unwrap();
        assert_eq!((&*last.bytes, last.ecn), (&b"c"[..], Ecn::Ect0));
        assert_eq!(last.from.remote, "192.0.2.1:1000".parse().unwrap());
        assert_eq!(last.from.local.unwrap().ip, "192.0.2.2".parse::<std::net::IpAddr>().unwrap());
        assert_eq!(b.recv(&mut slots).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn full_link_takes_no_part_of_a_train_and_a_closed_one_swallows_all() {
        let (mut a, mut b) = hosts();
        let to = "192.0.2.2:2000";
        assert_eq!(a.send(&[train(to, 1, b"abc"), train(to, 1, b"de")], &mut Unsent::new()).unwrap(), 1);
        assert_eq!(
            a.send(&[train(to, 1, b"de")], &mut Unsent::new()).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        b.close();
        assert_eq!(a.send(&[train(to, 1, b"de")], &mut Unsent::new()).unwrap(), 1);
        b.open(0, 0).unwrap();
        assert_eq!(b.recv(&mut RxSlots::new(8)).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn planned_faults_hit_the_named_call_only() {
        let (mut a, mut host) = tun_pair(2);
        a.faults.fail_send(2, libc::EIO);
        let hdr = VnetHdr::default();
        assert!(a.send(&hdr, &[IoSlice::new(b"1")]).is_ok());
        assert_eq!(a.send(&hdr, &[IoSlice::new(b"2")]).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(a.send_plain(&mut { *b"..........3" }).is_ok());
        assert_eq!(a.send(&hdr, &[]).unwrap_err().raw_os_error(), Some(libc::ENOBUFS));
        let mut buf = [0; 4];
        assert_eq!(host.recv(&mut buf).unwrap().0, 1);
        assert_eq!((host.recv(&mut buf).unwrap().0, buf[0]), (1, b'3'));
    }

    #[test]
    fn packet_wakes_the_other_end_that_parks() {
        let (mut a, mut host) = tun_pair(2);
        let mut poller = Poller::new().unwrap();
        a.attach(&poller).unwrap();
        let sender =
            std::thread::spawn(move || host.send(&VnetHdr::default(), &[IoSlice::new(b"x")]).unwrap());
        poller.park(crate::time::Instant::ZERO, None).unwrap();
        sender.join().unwrap();
        assert!(a.recv(&mut [0; 4]).is_ok());
    }
}
