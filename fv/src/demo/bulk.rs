//! One long TCP transfer from host to host, with a progress line; what arrives is checked by its SHA-256.

use std::io::{self, IsTerminal, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forestvpn_quantum::time::{Entropy, OsEntropy};
use sha2::{Digest, Sha256};

use crate::namespace::Namespace;

/// Bytes that are made once and sent again and again, each time with another number in front.
const BLOCK: usize = 1 << 20;
/// Nothing moved for so long: the transfer failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// What came of a transfer.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// Bytes that arrived.
    pub(crate) bytes: u64,
    /// From the first byte sent to the last one read.
    pub(crate) time: Duration,
    /// Of what was sent.
    pub(crate) sent: [u8; 32],
    /// Of what arrived.
    pub(crate) received: [u8; 32],
}

impl Transfer {
    /// What arrived is what was sent.
    pub(crate) fn intact(&self) -> bool {
        self.bytes > 0 && self.sent == self.received
    }
}

/// What is sent: `megabytes` blocks that nobody can compress or predict, and their hash, made beforehand so that
/// only the receiver's hashing costs time during the transfer.
#[derive(Debug)]
pub(crate) struct Load {
    block: Vec<u8>,
    megabytes: u64,
    hash: [u8; 32],
}

impl Load {
    /// Makes it. About a second for a gigabyte.
    pub(crate) fn new(megabytes: u64) -> Self {
        let mut block = vec![0; BLOCK];
        OsEntropy.fill(&mut block);
        let mut load = Self { block, megabytes, hash: [0; 32] };
        let mut hasher = Sha256::new();
        // Fails only when it is interrupted, and then nobody wants the hash.
        let _ = load.each(|block| {
            hasher.update(block);
            Ok(())
        });
        load.hash = hasher.finalize().into();
        load
    }

    fn each(&self, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut block = self.block.clone();
        for number in 0..self.megabytes {
            if super::interrupted() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            block[..8].copy_from_slice(&number.to_le_bytes());
            take(&block)?;
        }
        Ok(())
    }
}

/// Sends `load` from the first host to the second one, which has the address `to`.
///
/// # Errors
/// When the connection cannot be made or breaks.
pub(crate) fn transfer(
    hosts: (&Namespace, &Namespace),
    to: IpAddr,
    load: &Load,
    label: &str,
) -> io::Result<Transfer> {
    let (from, target) = hosts;
    let listener = target.run(|| TcpListener::bind(SocketAddr::new(to, 0)))??;
    let address = listener.local_addr()?;
    let mut out = from.run(|| TcpStream::connect_timeout(&address, PATIENCE))??;
    let (mut input, _) = listener.accept()?;
    out.set_write_timeout(Some(PATIENCE))?;
    input.set_read_timeout(Some(PATIENCE))?;
    let both = [out.try_clone()?, input.try_clone()?];
    let arrived = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            load.each(|block| out.write_all(block))?;
            out.shutdown(Shutdown::Write)
        });
        let receiver = scope.spawn(|| {
            let mut hasher = Sha256::new();
            let mut buffer = vec![0; 256 * 1024];
            loop {
                match input.read(&mut buffer) {
                    Ok(0) => return Ok((hasher.finalize().into(), start.elapsed())),
                    Ok(length) => {
                        hasher.update(&buffer[..length]);
                        arrived.fetch_add(length as u64, Ordering::Relaxed);
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
        });
        let mut progress = Progress::new(label, load.megabytes);
        while !receiver.is_finished() {
            std::thread::sleep(Duration::from_millis(50));
            progress.show(arrived.load(Ordering::Relaxed), start.elapsed());
            if super::interrupted() {
                both.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
            }
        }
        progress.end(arrived.load(Ordering::Relaxed), start.elapsed());
        let crashed = |_| Err(io::Error::other("the transfer crashed"));
        sender.join().unwrap_or_else(|_| Err(io::Error::other("the transfer crashed")))?;
        let (received, time) = receiver.join().unwrap_or_else(crashed)?;
        Ok(Transfer { bytes: arrived.load(Ordering::Relaxed), time, sent: load.hash, received })
    })
}

/// A line that is written over on a terminal, and a few lines elsewhere.
#[derive(Debug)]
pub(crate) struct Progress<'a> {
    label: &'a str,
    megabytes: u64,
    terminal: bool,
    shown: Duration,
}

impl<'a> Progress<'a> {
    /// Nothing is shown yet.
    pub(crate) fn new(label: &'a str, megabytes: u64) -> Self {
        Self { label, megabytes, terminal: io::stdout().is_terminal(), shown: Duration::ZERO }
    }

    /// Shows how far it is, if it is time to.
    pub(crate) fn show(&mut self, bytes: u64, time: Duration) {
        let pause = Duration::from_millis(if self.terminal { 200 } else { 2000 });
        if time.saturating_sub(self.shown) >= pause {
            self.shown = time;
            self.line(bytes, time, if self.terminal { "\r" } else { "\n" });
        }
    }

    /// Shows the end.
    pub(crate) fn end(&self, bytes: u64, time: Duration) {
        self.line(bytes, time, "\n");
    }

    fn line(&self, bytes: u64, time: Duration, end: &str) {
        let mut out = io::stdout();
        let text = format!(
            "  {}: {:>4} of {} MB, {:>7.0} Mbit/s{end}",
            self.label,
            bytes >> 20,
            self.megabytes,
            megabits(bytes, time)
        );
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

/// Mbit/s.
pub(crate) fn megabits(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / 1e6 / time.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::alone;

    #[test]
    fn a_transfer_arrives_whole_and_a_changed_byte_would_be_noticed() {
        alone(|| {
            let host = Namespace::new().unwrap();
            let load = Load::new(3);
            let mut done = transfer((&host, &host), "127.0.0.1".parse().unwrap(), &load, "test").unwrap();
            assert_eq!(done.bytes, 3 << 20);
            assert!(done.intact());
            done.received[0] ^= 1;
            assert!(!done.intact());
        });
    }

    #[test]
    fn every_block_of_the_load_is_another_one() {
        let mut seen = Vec::new();
        Load::new(3)
            .each(|block| {
                seen.push(block.to_vec());
                Ok(())
            })
            .unwrap();
        assert_eq!(seen.len(), 3);
        assert!(seen[0] != seen[1] && seen[1] != seen[2]);
    }
}
