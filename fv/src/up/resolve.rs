//! Names in `Endpoint`: looked up beside everything else, again and again until there is an answer. A resolver
//! that is not there yet, or never answers, holds up nothing but its own peers. Called by `up`.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forestvpn_quantum::PublicKey;

/// A lookup may take half a minute to fail; this many run beside each other.
const THREADS: usize = 8;

/// An endpoint that is given by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// Whose endpoint it is.
    pub(crate) peer: PublicKey,
    /// Host name, without port.
    pub(crate) host: String,
    /// UDP port.
    pub(crate) port: u16,
    /// Where the peer was looked for in vain: another address of the name comes first, one of the other family before
    /// all.
    pub(crate) avoid: Option<SocketAddr>,
}

/// The pauses between two tries for the same name: doubled from `first` up to `longest`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pauses {
    /// After the first failure.
    pub(crate) first: Duration,
    /// After many.
    pub(crate) longest: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(30) }
    }
}

/// What the threads need from outside.
pub(crate) trait Resolver: Send + Sync + 'static {
    /// All addresses of a name, best first. May block as long as it likes.
    ///
    /// # Errors
    /// Whatever the system's resolver says.
    fn lookup(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        (host, port).to_socket_addrs().map(Iterator::collect)
    }

    /// There is a way to this address now.
    fn reachable(&self, address: SocketAddr) -> bool;

    /// The answer; called once for every name.
    fn found(&self, name: &Name, address: SocketAddr);
}

struct Task {
    name: Name,
    due: Instant,
    pause: Duration,
    complained: bool,
}

/// Starts looking up `names`; gives control back at once. The threads end when every name has its answer.
///
/// # Errors
/// When the system gives no thread.
pub(crate) fn start(names: Vec<Name>, pauses: Pauses, resolver: Arc<impl Resolver>) -> io::Result<()> {
    let now = Instant::now();
    let threads = names.len().min(THREADS);
    let tasks: Vec<_> = names
        .into_iter()
        .map(|name| Task { name, due: now, pause: pauses.first, complained: false })
        .collect();
    let tasks = Arc::new(Mutex::new(tasks));
    for _ in 0..threads {
        let (tasks, resolver) = (Arc::clone(&tasks), Arc::clone(&resolver));
        thread::Builder::new().name("resolve".to_owned()).spawn(move || {
            while let Some(task) = next(&tasks) {
                thread::sleep(task.due.saturating_duration_since(Instant::now()));
                if let Some(again) = attempt(task, pauses, &*resolver) {
                    tasks.lock().unwrap_or_else(PoisonError::into_inner).push(again);
                }
            }
        })?;
    }
    Ok(())
}

/// The task that is due first. A thread that finds none may end: whoever puts one back takes the next one.
fn next(tasks: &Mutex<Vec<Task>>) -> Option<Task> {
    let mut tasks = tasks.lock().unwrap_or_else(PoisonError::into_inner);
    let (first, _) = tasks.iter().enumerate().min_by_key(|(_, task)| task.due)?;
    Some(tasks.swap_remove(first))
}

fn attempt(mut task: Task, pauses: Pauses, resolver: &impl Resolver) -> Option<Task> {
    let Name { host, port, avoid, .. } = &task.name;
    let answer = resolver
        .lookup(host, *port)
        .and_then(|addresses| choose(&addresses, *avoid, |address| resolver.reachable(address)));
    match answer {
        Ok(address) => {
            if Some(address) != *avoid {
                log::info!("{host} is {}", address.ip());
            }
            resolver.found(&task.name, address);
            None
        }
        Err(error) => {
            if !task.complained {
                log::warn!("cannot find the address of {host}: {error}; trying again until it is there");
                task.complained = true;
            }
            task.due = Instant::now() + task.pause;
            task.pause = (task.pause * 2).min(pauses.longest);
            Some(task)
        }
    }
}

/// The first address to which there is a way: a host without IPv6 gets the IPv4 one, whatever the order. When
/// there is no way to any of them yet, only a name with one kind of address leaves nothing to wait for. `avoid` and its
/// family come last.
fn choose(
    addresses: &[SocketAddr],
    avoid: Option<SocketAddr>,
    reachable: impl Fn(SocketAddr) -> bool,
) -> io::Result<SocketAddr> {
    let first = addresses.first().ok_or_else(|| io::Error::other("it has no address"))?;
    let last = |address: &&SocketAddr| {
        avoid.is_some_and(|avoid| avoid.is_ipv4() == address.is_ipv4()).then_some(avoid == Some(**address))
    };
    match addresses.iter().filter(|address| reachable(**address)).min_by_key(last) {
        Some(address) => Ok(*address),
        None if addresses.iter().all(|address| address.is_ipv4() == first.is_ipv4()) => Ok(*first),
        None => Err(io::Error::other("there is no route to any of its addresses yet")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    const V4: &str = "192.0.2.1:51820";
    const V6: &str = "[2001:db8::1]:51820";

    /// Answers a name after so many failures; `stuck` never answers.
    struct Script {
        failures: HashMap<&'static str, AtomicUsize>,
        found: mpsc::Sender<(Name, SocketAddr)>,
    }

    impl Resolver for Script {
        fn lookup(&self, host: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
            if host == "stuck" {
                thread::park();
            }
            match self.failures[host].fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)) {
                Ok(_) => Err(io::Error::other("no resolver")),
                Err(_) => Ok(vec![V4.parse().unwrap()]),
            }
        }
        fn reachable(&self, _: SocketAddr) -> bool {
            true
        }
        fn found(&self, name: &Name, address: SocketAddr) {
            self.found.send((name.clone(), address)).unwrap();
        }
    }

    fn name(host: &str) -> Name {
        Name { peer: PublicKey([host.len() as u8; 32]), host: host.to_owned(), port: 51820, avoid: None }
    }

    #[test]
    fn a_name_is_tried_until_the_resolver_is_there_while_others_and_a_stuck_one_do_not_wait_for_it() {
        let (found, answers) = mpsc::channel();
        let failures = HashMap::from([("good", AtomicUsize::new(0)), ("late", AtomicUsize::new(5))]);
        let pauses = Pauses { first: Duration::from_millis(1), longest: Duration::from_millis(4) };
        let names = vec![name("stuck"), name("late"), name("good")];
        start(names, pauses, Arc::new(Script { failures, found })).unwrap();
        let wait = Duration::from_secs(10);
        let mut seen: Vec<_> = (0..2).map(|_| answers.recv_timeout(wait).unwrap()).collect();
        seen.sort_by(|a, b| a.0.host.cmp(&b.0.host));
        let address = V4.parse().unwrap();
        assert_eq!(seen, [(name("good"), address), (name("late"), address)]);
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let (found, _answers) = mpsc::channel();
        let script = Script { failures: HashMap::from([("down", AtomicUsize::new(99))]), found };
        let pauses = Pauses { first: Duration::from_secs(1), longest: Duration::from_secs(5) };
        let mut task =
            Task { name: name("down"), due: Instant::now(), pause: pauses.first, complained: false };
        let mut seen = Vec::new();
        for _ in 0..5 {
            seen.push(task.pause.as_secs());
            task = attempt(task, pauses, &script).unwrap();
        }
        assert_eq!(seen, [1, 2, 4, 5, 5]);
    }

    #[test]
    fn a_host_without_ipv6_gets_the_ipv4_address_even_when_it_is_second() {
        let [v4, v6] = [V4, V6].map(|text| text.parse::<SocketAddr>().unwrap());
        assert_eq!(choose(&[v6, v4], None, |address| address.is_ipv4()).unwrap(), v4);
        assert_eq!(choose(&[v6, v4], None, |_| true).unwrap(), v6);
        assert_eq!(choose(&[v6], None, |_| false).unwrap(), v6);
        assert!(choose(&[v6, v4], None, |_| false).is_err());
        assert!(choose(&[], None, |_| true).is_err());
    }

    #[test]
    fn f90_after_an_address_that_stays_silent_the_other_family_is_tried_then_another_address_then_the_same() {
        let [v4, other, v6] = [V4, "192.0.2.2:51820", V6].map(|text| text.parse::<SocketAddr>().unwrap());
        let next = |all: &[SocketAddr], avoid| choose(all, Some(avoid), |_| true).unwrap();
        assert_eq!(next(&[v6, v4], v6), v4);
        assert_eq!(next(&[v6, v4], v4), v6);
        assert_eq!(next(&[v4, other], v4), other);
        assert_eq!(next(&[v4], v4), v4);
        assert_eq!(choose(&[v6, v4], Some(v4), |address| address.is_ipv4()).unwrap(), v4);
    }
}
