//! Bulk data between two hosts, checked byte for byte. Used by the interop and protocol tests.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::host::Host;

/// Only one test at a time may load the machine; the others wait for answers that must come in time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static LOAD: Mutex<()> = Mutex::new(());
    LOAD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`alone`], for one of several loads in a row: whoever waits comes in between, as sessions grow old by waiting.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    std::thread::sleep(Duration::from_millis(100));
    alone()
}

/// A stream of bytes that is never the same at two places, so that a lost or moved piece shows.
struct Pattern(u64);

impl Pattern {
    fn fill(&mut self, buffer: &mut [u8]) {
        for word in buffer.chunks_exact_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_le_bytes());
        }
    }
}

const CHUNK: usize = 64 * 1024;

/// Sends `bytes` (a multiple of 64 KiB) over TCP from one host to `address` on the other and compares every byte.
#[track_caller]
pub(crate) fn tcp(from: &Host, to: &Host, address: &str, bytes: usize) {
    let address: IpAddr = address.parse().expect("an address");
    let limit = Duration::from_secs(60);
    let (port, listening) = mpsc::channel();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            to.enter(move || {
                let listener = TcpListener::bind((address, 0)).expect("listen");
                port.send(listener.local_addr().expect("address").port()).expect("sender waits");
                listener.set_nonblocking(true).expect("non-blocking");
                let end = Instant::now() + limit;
                let mut stream = loop {
                    match listener.accept() {
                        Ok((stream, _)) => break stream,
                        Err(e) => assert!(Instant::now() < end, "nobody connected: {e}"),
                    }
                    std::thread::sleep(Duration::from_millis(5));
                };
                stream.set_nonblocking(false).expect("blocking");
                stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
                let (mut pattern, mut want, mut have) = (Pattern(42), vec![0; CHUNK], vec![0; CHUNK]);
                for at in (0..bytes).step_by(CHUNK) {
                    pattern.fill(&mut want);
                    stream
                        .read_exact(&mut have)
                        .unwrap_or_else(|e| panic!("after {at} of {bytes} bytes: {e}"));
                    assert!(have == want, "wrong bytes after {at}");
                }
                stream.write_all(b"whole").expect("answer");
            });
        });
        let port = listening.recv_timeout(Duration::from_secs(5)).expect("receiver listens");
        from.enter(move || {
            let mut stream =
                TcpStream::connect_timeout(&SocketAddr::new(address, port), Duration::from_secs(10))
                    .expect("connect");
            stream.set_write_timeout(Some(Duration::from_secs(20))).expect("timeout");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            let (mut pattern, mut chunk) = (Pattern(42), vec![0; CHUNK]);
            for _ in (0..bytes).step_by(CHUNK) {
                pattern.fill(&mut chunk);
                stream.write_all(&chunk).expect("send");
            }
            let mut answer = [0; 5];
            stream.read_exact(&mut answer).expect("the receiver's answer");
        });
        receiver.join().expect("receiver");
    });
}
