//! The two ends of the demo's tunnel: two processes of this very program, each in its own namespace, brought up by
//! `fv up` from a file like anybody's.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forestvpn_quantum::config::DeviceSnapshot;
use forestvpn_quantum::io::fd;
use forestvpn_quantum::time::{Entropy, OsEntropy};
use forestvpn_quantum::{PrivateKey, PublicKey};
use zeroize::Zeroizing;

use crate::key;
use crate::namespace::Namespace;
use crate::netlink::Netlink;
use crate::show;

/// An end has to be up after so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interfaces, and the addresses inside of the tunnel.
const SIDES: [(&str, &str, &str); 2] =
    [("fvleft", "10.77.0.1", "fd77::1"), ("fvright", "10.77.0.2", "fd77::2")];

/// The address of one end (0 left, 1 right) inside of the tunnel.
pub(crate) fn inner(side: usize, ipv6: bool) -> IpAddr {
    let (_, v4, v6) = SIDES[side % 2];
    (if ipv6 { v6 } else { v4 }).parse().unwrap_or_else(|_| IpAddr::from([0; 4]))
}

/// A folder of our own for files and sockets; goes when it is dropped.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Makes it, for our eyes only.
    ///
    /// # Errors
    /// When the system's folder for temporary files is not writable.
    pub(crate) fn make() -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("fv-demo-{}", std::process::id()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|e| {
            format!("cannot make the folder {}: {e}; set TMPDIR to another place", path.display())
        })?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running end.
#[derive(Debug)]
pub(crate) struct End {
    interface: &'static str,
    folder: PathBuf,
    child: Child,
}

impl End {
    /// Starts both ends and waits until both are up.
    ///
    /// # Errors
    /// What the end said that did not come up.
    pub(crate) fn start_both(
        hosts: &[Namespace; 2],
        outer: [IpAddr; 2],
        folder: &Folder,
    ) -> Result<[Self; 2], String> {
        let keys = [(); 2].map(|()| {
            let mut bytes = [0; 32];
            OsEntropy.fill(&mut bytes);
            PrivateKey::new(bytes)
        });
        let start = |side: usize| {
            let (this, other) = (side % 2, (side + 1) % 2);
            let text = config(&keys[this], &keys[other].public_key(), this, outer[other]);
            Self::start(&hosts[this], this, &text, &folder.0)
                .map_err(|e| format!("the end {} does not start: {e}", SIDES[this].0))
        };
        let mut ends = [start(0)?, start(1)?];
        for (end, host) in ends.iter_mut().zip(hosts) {
            end.wait_until_up(host)?;
        }
        Ok(ends)
    }

    fn start(host: &Namespace, side: usize, config: &str, folder: &Path) -> io::Result<Self> {
        let (interface, _, _) = SIDES[side % 2];
        let file = folder.join(format!("{interface}.conf"));
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&file)?
            .write_all(config.as_bytes())?;
        let log = File::create(folder.join(format!("{interface}.log")))?;
        // In a folder of ours: the usual place belongs to a root who we may not be.
        let control = UnixListener::bind(folder.join(format!("{interface}.sock")))?;
        let number = fd::pass_on(control.as_fd())?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["up", "--for-demo"])
            .arg(&file)
            .env("WG_UAPI_FD", number.to_string())
            .env("LOG_LEVEL", "error")
            .env_remove("WG_TUN_FD")
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        let child = host.run(|| command.spawn())??;
        Ok(Self { interface, folder: folder.to_owned(), child })
    }

    fn wait_until_up(&mut self, host: &Namespace) -> Result<(), String> {
        let start = Instant::now();
        let is_up = || {
            host.run(|| Netlink::open()?.link(self.interface))
                .is_ok_and(|found| found.is_ok_and(|link| link.is_some_and(|link| link.up)))
        };
        while !is_up() {
            let ended = self.child.try_wait().ok().flatten();
            if ended.is_some() || start.elapsed() > PATIENCE || super::interrupted() {
                let said = fs::read_to_string(self.folder.join(format!("{}.log", self.interface)));
                let state = ended.map_or_else(|| "no answer".to_owned(), |status| status.to_string());
                return Err(format!(
                    "the end {} did not come up ({state}): {}",
                    self.interface,
                    said.unwrap_or_default().trim()
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Its state, asked for over its control socket as `wg` does.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn snapshot(&self) -> Result<DeviceSnapshot, String> {
        show::ask(&self.folder, self.interface)
    }

    /// Processor time it has used so far, in user and kernel space.
    pub(crate) fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        ticks(&stat).map_or(Duration::ZERO, |ticks| Duration::from_millis(ticks * 10))
    }

    /// Ends it in order and gives what it counted, by name.
    ///
    /// # Errors
    /// When it did not end well.
    pub(crate) fn stop(mut self) -> Result<BTreeMap<String, u64>, String> {
        // With its standard input closed it ends.
        drop(self.child.stdin.take());
        let mut said = String::new();
        let read = self.child.stdout.take().map(|mut out| out.read_to_string(&mut said));
        let status = self.child.wait();
        match (read, status) {
            (Some(Ok(_)), Ok(status)) if status.success() => Ok(said
                .lines()
                .filter_map(|line| {
                    let (name, value) = line.split_once(' ')?;
                    Some((name.to_owned(), value.parse().ok()?))
                })
                .collect()),
            (_, Ok(status)) => Err(format!("the end {} ended with {status}", self.interface)),
            (_, Err(e)) => Err(format!("the end {} is lost: {e}", self.interface)),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // After `stop` there is nothing left of it; on any other way out it must not stay behind.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn config(own: &PrivateKey, peer: &PublicKey, side: usize, endpoint: IpAddr) -> Zeroizing<String> {
    let private = key::private_text(own);
    let (other, this) = (SIDES[(side + 1) % 2], SIDES[side % 2]);
    Zeroizing::new(format!(
        "[Interface]\nPrivateKey = {}\nListenPort = 51820\nAddress = {}/24, {}/64\n\n[Peer]\nPublicKey = {}\n\
         Endpoint = {endpoint}:51820\nAllowedIPs = {}/32, {}/128\n",
        &*private,
        this.1,
        this.2,
        key::public_text(peer),
        other.1,
        other.2,
    ))
}

/// Ticks of 10 ms (USER_HZ is 100 wherever Linux runs today) in user and kernel space, from a line of
/// /proc/PID/stat; the name in it may contain anything.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_whatever_the_process_is_called() {
        let stat = "7 (a) R b) S 1 7 7 0 -1 4194560 999 0 0 0 25 17 3 4 20 0 1 0 100 0 0";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks(""), None);
    }

    #[test]
    fn the_file_of_an_end_is_one_that_fv_up_takes() {
        let (own, peer) = (PrivateKey::new([7; 32]), PrivateKey::new([8; 32]).public_key());
        let text = config(&own, &peer, 0, IpAddr::from([192, 0, 2, 2]));
        let file = crate::config::ConfigFile::parse(text.as_bytes()).unwrap();
        assert_eq!(file.interface.private_key, Some(own));
        assert_eq!(file.peers[0].public_key, peer);
        let endpoint = file.peers[0].endpoint.as_ref().and_then(crate::config::Remote::address);
        assert_eq!(endpoint, Some("192.0.2.2:51820".parse().unwrap()));
        assert_eq!(file.interface.addresses[0].addr(), inner(0, false));
        assert_eq!(file.peers[0].allowed_ips[1].addr(), inner(1, true));
    }
}
